"""StepTimePredictor: how long a step will take, learnt from the steps before it.

Recursive least squares (Haykin, Adaptive Filter Theory, chapter 10) on what a plan says of itself: a fixed cost, prefill tokens,
decoded tokens, the context those look at, further rounds of a step in which sequences decode several tokens, and whether another
engine had the device before. Errors are weighed relative to the duration, so that short steps count as much as long ones. Engines
that pad their steps run a few shapes over and over: one that has come often enough is expected to take what it took of late, since
no line goes through programs that were each compiled for one shape. A quantile of recent actual / predicted turns the expectation
into a bound; each kind of guess has its own, or the line's errors would widen what shapes know well. Pure: no clock, no engine; it
refuses to guess before it has seen MIN_STEPS. Invariant: a bound is never below the expectation, and neither is ever negative.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools

import numpy as np
from jaxtyping import Float64

from common.serving.engine import StepPlan

MIN_STEPS = 8
"""Before that the weights are underdetermined: they fit what they saw and say nonsense about anything else."""
WINDOW_STEPS = 256
"""Recent steps that margin and stated error are taken from: long enough for a p99, short enough to follow the machine."""
FORGETTING = 0.9995
"""Weight of a step once the next has been seen; costs drift when the machine's clock does."""
PRIOR = 1.0
"""Initial variance of each weight (square seconds for its feature's typical size), far above any real one. It also caps what is
forgotten: without new kinds of steps the weights would drift."""
MAX_MARGIN = 3.0
"""A few steps that another process held up for long must not make every later one look as long: that is for caution to answer."""
NEWEST_STEPS = 8
"""Whose median says that the machine has just slowed down, before the expectation does."""
SMALLEST_S = 1e-5
SHAPE_SIGHTINGS = 4
"""Of one shape, before its own mean says more than the line through all."""
SHAPE_WEIGHT = 0.2
"""Of the newest step in a shape's mean: it follows the machine within some steps and is not led by a single one."""
MAX_SHAPES = 1024
"""Remembered; those not seen for longest go first. More than any padding engine has."""

SCALES = np.array([1.0, 1e2, 1e1, 1e4, 1e1, 1.0])
"""Typical size of each feature, so that all weights are seconds of comparable size."""

Shape = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFeatures:
    """What a step's duration depends on. `context_tokens` sums, over decoded tokens, the cached ones each looks at.

    Counts are those of StepPlan.computed. Of prefill and decode tokens, `padding_tokens` are no request's.
    """

    prefill_tokens: int
    decode_tokens: int
    context_tokens: int
    rounds: int = 1
    switched: bool = False
    padding_tokens: int = 0

    @classmethod
    def of(cls, plan: StepPlan, *, switched: bool = False) -> StepFeatures:
        prefill_tokens, decode_tokens, context_tokens = plan.computed
        return cls(
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            context_tokens=context_tokens,
            rounds=max((entry.num_tokens for entry in plan.decode), default=1),
            switched=switched,
            padding_tokens=prefill_tokens + decode_tokens - plan.num_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Those of requests."""
        return self.prefill_tokens + self.decode_tokens - self.padding_tokens

    @property
    def useful_share(self) -> float:
        """Of what the device computes, the share that is a request's."""
        return self.num_tokens / max(1, self.num_tokens + self.padding_tokens)

    @property
    def shape(self) -> Shape:
        """What the device computes, whoever's it is and whoever had it before."""
        return self.prefill_tokens, self.decode_tokens, self.context_tokens, self.rounds

    def vector(self) -> Float64[np.ndarray, "6"]:
        values = (1.0, self.prefill_tokens, self.decode_tokens, self.context_tokens, self.rounds - 1, self.switched)
        return np.array(values) / SCALES


@dataclasses.dataclass(slots=True)
class _Seen:
    mean_s: float
    sightings: int = 1

    def see(self, duration_s: float) -> None:
        self.sightings += 1
        self.mean_s += (duration_s - self.mean_s) * max(SHAPE_WEIGHT, 1 / self.sightings)


class _Margin:
    """What guesses of one kind are multiplied with: a quantile of their recent actual / predicted."""

    def __init__(self, quantile: float) -> None:
        self._quantile = quantile
        self.recent: collections.deque[float] = collections.deque()
        self._sorted: list[float] = []
        self.value = 1.0

    def note(self, ratio: float) -> None:
        self.recent.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self.recent) > WINDOW_STEPS:
            oldest = self.recent.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]
        place = min(len(self._sorted) - 1, int(self._quantile * len(self._sorted)))
        self.value = min(MAX_MARGIN, max(1.0, self._sorted[place]))


class StepTimePredictor:
    """See the module.

    Args:
        quantile: of recent actual / predicted; the bound holds for about this share of steps.
    """

    def __init__(self, *, quantile: float = 0.99) -> None:
        if not 0.5 <= quantile < 1:
            raise ValueError(f"quantile={quantile} must lie in [0.5, 1)")
        self._weights = np.zeros(len(SCALES))
        self._covariance = np.eye(len(SCALES)) * PRIOR
        self._of_line, self._of_shapes = _Margin(quantile), _Margin(quantile)
        self._recent: collections.deque[float] = collections.deque(maxlen=WINDOW_STEPS)
        self._last_margin = self._of_line
        self._shapes: collections.OrderedDict[Shape, _Seen] = collections.OrderedDict()
        self.num_steps = 0

    @property
    def ready(self) -> bool:
        return self.num_steps >= MIN_STEPS

    @property
    def margin(self) -> float:
        """What the expectation of a step like the last one is multiplied with to bound it."""
        return self._last_margin.value

    @property
    def fixed_s(self) -> float:
        """What a step costs before it holds any token, a switch included."""
        return max(SMALLEST_S, float(self._weights[0]) + self._switch_s)

    @property
    def _switch_s(self) -> float:
        return max(0.0, float(self._weights[5]))

    def error(self, quantile: float = 0.9) -> float:
        """This quantile of |actual / predicted - 1| over recent steps: the stated error."""
        if not self._recent:
            return float("inf")
        return float(np.quantile(np.abs(np.array(self._recent) - 1.0), quantile))

    def expected_s(self, features: StepFeatures) -> float:
        return self._guess(features)[0]

    @property
    def drift(self) -> float:
        """Median of actual / predicted over the newest steps, at least 1."""
        newest = sorted(itertools.islice(reversed(self._recent), NEWEST_STEPS))
        return max(1.0, newest[len(newest) // 2]) if newest else 1.0

    def bound_s(self, features: StepFeatures) -> float:
        """What the step will not take longer than, most likely."""
        expected_s, margin = self._guess(features)
        known = len(margin.recent) >= MIN_STEPS
        return expected_s * (margin.value if known else max(self._of_line.value, self._of_shapes.value))

    def _guess(self, features: StepFeatures) -> tuple[float, _Margin]:
        if features.num_tokens == 0:
            return 0.0, self._of_line
        seen = self._shapes.get(features.shape)
        if seen is not None and seen.sightings >= SHAPE_SIGHTINGS:
            return max(SMALLEST_S, seen.mean_s + features.switched * self._switch_s), self._of_shapes
        return max(SMALLEST_S, float(self._weights @ features.vector())), self._of_line

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Learn from a step; one without tokens teaches nothing."""
        if features.num_tokens == 0 or duration_s <= 0:
            return
        if self.ready:
            expected_s, self._last_margin = self._guess(features)
            self._last_margin.note(duration_s / expected_s)
            self._recent.append(duration_s / expected_s)
        scaled = features.vector() / duration_s
        gain = self._covariance @ scaled
        gain /= FORGETTING + float(scaled @ gain)
        self._weights = self._weights + gain * (1.0 - float(self._weights @ scaled))
        self._covariance = self._covariance - np.outer(gain, scaled @ self._covariance)
        if float(np.trace(self._covariance)) < PRIOR * len(SCALES) * FORGETTING:
            self._covariance /= FORGETTING
        self._remember(features.shape, max(SMALLEST_S, duration_s - features.switched * self._switch_s))
        self.num_steps += 1

    def _remember(self, shape: Shape, duration_s: float) -> None:
        seen = self._shapes.get(shape)
        if seen is None:
            self._shapes[shape] = _Seen(duration_s)
            if len(self._shapes) > MAX_SHAPES:
                self._shapes.popitem(last=False)
        else:
            seen.see(duration_s)
            self._shapes.move_to_end(shape)
