"""KvLedger: the bytes of a device that two models share, and how many of them each cache may hold from when on.

One budget has everything: weights, workspaces and caches of both models. Serving's cache has a guaranteed headroom and gets beyond
it what it needs at its next step; rollouts have the rest, and give it back when asked:
  calm    rollouts may hold all but serving's headroom
  frozen  serving's need has passed the high watermark: one emergency cut has halved what rollouts may hold; where that is not
          enough they lose what is missing. They regrow at the next learner step, or once serving has been quiet for a while.
Deterministic: no thread, socket or clock; it moves no memory. Invariants: what both hold or may hold is never more than the budget
together, whatever is reported late; serving is refused nothing while rollouts hold anything, only told to wait until it is back.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from common.serving.coserving.events import Side

OTHER = {Side.SERVING: Side.ROLLOUT, Side.ROLLOUT: Side.SERVING}


class MemoryState(enum.StrEnum):
    CALM = "calm"
    FROZEN = "frozen"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Shares of the bytes that both caches have together (headroom), and of what serving may hold (watermarks).

    Args:
        headroom_share: what rollouts never get.
        high_watermark: serving's need above it is pressure.
        low_watermark: below it serving is quiet; the distance between both is the hysteresis.
        quiet_s: for so long, before rollouts regrow without a learner step.
    """

    headroom_share: float = 0.2
    high_watermark: float = 0.8
    low_watermark: float = 0.5
    quiet_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.headroom_share < 1:
            raise ValueError(f"headroom_share={self.headroom_share} must lie in (0, 1)")
        if not 0 < self.low_watermark < self.high_watermark <= 1:
            raise ValueError(
                f"0 < low_watermark={self.low_watermark} < high_watermark={self.high_watermark} <= 1 must hold, or cuts and "
                "regrowth follow each other"
            )
        if not self.quiet_s > 0:
            raise ValueError(f"quiet_s={self.quiet_s} must be greater than 0")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """Serving's next step needs a cache of so many bytes, what is in use already included."""

    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A cache holds so many bytes now: it has grown within its limit, or given memory back."""

    side: Side
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """Weights and workspaces of a model take so many bytes now, e.g. 0 while it is parked."""

    side: Side
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LearnerStepped:
    """The rollout model has new weights: a new step of RL begins."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A model's engine is no more, and nothing of it in memory."""

    side: Side


MemoryEvent = Needed | Held | Fixed | LearnerStepped | Gone


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resize:
    """From its next step on a cache may hold so many bytes. `why` is for people."""

    side: Side
    limit_bytes: int
    why: str


class KvLedger:
    """See the module.

    Args:
        budget_bytes: of the device, or the part of it that these two models have.
        fixed: bytes of weights and workspaces of each model at the beginning.
    """

    def __init__(self, budget_bytes: int, fixed: dict[Side, int], settings: MemorySettings | None = None) -> None:
        self.settings = settings or MemorySettings()
        self.budget_bytes = budget_bytes
        self._fixed = {side: fixed.get(side, 0) for side in Side}
        if self.pool_bytes <= 0:
            raise ValueError(
                f"budget_bytes={budget_bytes} leaves nothing for caches beside {sum(self._fixed.values())} bytes of weights and "
                "workspaces; raise it or use smaller models"
            )
        self.state = MemoryState.CALM
        self.num_cuts = 0
        self._held = dict.fromkeys(Side, 0)
        self._needed = 0
        self._most = self._calm_target()
        """What rollouts may hold as far as policy goes, whoever holds what now."""
        self._quiet_since_s: float | None = None
        self._limit = {Side.ROLLOUT: self._most, Side.SERVING: self.pool_bytes - self._most}

    @property
    def pool_bytes(self) -> int:
        """What both caches have together."""
        return self.budget_bytes - sum(self._fixed.values())

    def limit_bytes(self, side: Side) -> int:
        """What a cache may hold from its next step on."""
        return self._limit[side]

    def held_bytes(self, side: Side) -> int:
        return self._held[side]

    @property
    def missing_bytes(self) -> int:
        """What serving needs and may not hold yet: 0, or it waits for rollouts to give it back."""
        return max(0, min(self._needed, self.pool_bytes) - self._limit[Side.SERVING])

    def room_for_fixed(self, side: Side) -> int:
        """The most bytes that a model's weights and workspaces may take now without cutting a cache or serving's headroom."""
        room = self.pool_bytes - max(self._held[Side.SERVING], self._needed, self._headroom()) - self._held[Side.ROLLOUT]
        return self._fixed[side] + max(0, room)

    def on_event(self, event: MemoryEvent, now_s: float) -> tuple[Resize, ...]:
        """What changes; at most one Resize for each side, one that shrinks first.

        Raises:
            ValueError: a cache reports more than it may hold, or weights have no room: the engines did not obey.
        """
        why = "memory came back"
        match event:
            case Needed(num_bytes=num_bytes):
                self._needed = num_bytes
                why = self._relieve(now_s)
            case Held(side=side, num_bytes=num_bytes):
                self._check_held(side, num_bytes)
                self._held[side] = num_bytes
            case Fixed(side=side, num_bytes=num_bytes):
                self._fix(side, num_bytes)
                why = f"weights of {side} take {num_bytes} bytes"
            case LearnerStepped():
                self._regrow()
                why = "a new learner step"
            case Gone(side=side):
                self._held[side] = self._fixed[side] = 0
                if side is Side.SERVING:
                    self._needed = 0
                self._regrow()
                why = f"{side} is gone"
        return self._resize(why)

    def _headroom(self) -> int:
        return math.ceil(self.settings.headroom_share * self.pool_bytes)

    def _calm_target(self) -> int:
        """Rollouts' share while nothing is cut: enough is left for serving to stay below the high watermark."""
        return max(0, self.pool_bytes - max(self._headroom(), self._comfortable()))

    def _comfortable(self) -> int:
        """What serving would have to be able to hold for its need to be no pressure."""
        return math.ceil(self._needed / self.settings.high_watermark)

    def _relieve(self, now_s: float) -> str:
        """Serving's need is known: cut, or note that it is quiet."""
        space = self.pool_bytes - self._most
        if self._needed > self.settings.high_watermark * space:
            self._quiet_since_s = None
            if self.state is MemoryState.CALM:
                self.state = MemoryState.FROZEN
                self.num_cuts += 1
                self._most = min(self._most // 2, self._calm_target())
                return "pressure: an emergency cut"
            self._most = min(self._most, self._calm_target())
            return "pressure: what serving is short of"
        if self.state is MemoryState.CALM:
            return "serving needs it"
        if self._needed > self.settings.low_watermark * self._headroom():
            self._quiet_since_s = None
        elif self._quiet_since_s is None:
            self._quiet_since_s = now_s
        elif now_s - self._quiet_since_s >= self.settings.quiet_s:
            self._regrow()
            return "serving has been quiet"
        return "serving needs it"

    def _regrow(self) -> None:
        self._most, self._quiet_since_s = self._calm_target(), None
        if self._needed <= self.settings.high_watermark * self._headroom():
            self.state = MemoryState.CALM

    def _fix(self, side: Side, num_bytes: int) -> None:
        room = self.room_for_fixed(side)
        if num_bytes > max(room, self._fixed[side]):
            raise ValueError(f"weights of {side} cannot take {num_bytes} bytes: there is room for {room}; make room first")
        self._fixed[side] = num_bytes
        self._most = self._calm_target() if self.state is MemoryState.CALM else min(self._most, self._calm_target())

    def _check_held(self, side: Side, num_bytes: int) -> None:
        allowed = max(self._limit[side], self._held[side])  # a shrunken limit is obeyed at the next step, not before
        if not 0 <= num_bytes <= allowed:
            raise ValueError(f"the {side} cache holds {num_bytes} bytes, at most {allowed} were allowed")

    def _resize(self, why: str) -> tuple[Resize, ...]:
        """Lower limits at once, raise others by what nobody holds."""
        targets = {Side.ROLLOUT: min(self._most, self.pool_bytes), Side.SERVING: self.pool_bytes - min(self._most, self.pool_bytes)}
        changes = []
        for side in sorted(Side, key=lambda side: targets[side] > self._limit[side]):
            others = max(self._held[OTHER[side]], min(self._limit[OTHER[side]], targets[OTHER[side]]))
            limit = min(targets[side], max(0, self.pool_bytes - others))
            if limit != self._limit[side]:
                self._limit[side] = limit
                changes.append(Resize(side=side, limit_bytes=limit, why=why))
        return tuple(changes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reclaimable:
    """Something of the rollout model's in its cache that can be given up.

    Args:
        name: of a request, or of a prefix that nobody waits for.
        used_s: when it was last used, for prefixes.
        lost_tokens: of a live rollout, what would have to be computed again; None for a prefix.
    """

    name: str
    num_bytes: int
    used_s: float = 0.0
    lost_tokens: int | None = None


def first_to_go(candidates: list[Reclaimable], num_bytes: int) -> list[Reclaimable]:
    """What to give up for at least `num_bytes`, or everything if that is less: prefixes nobody waits for, the one unused for
    longest first; then live rollouts, the one with the least work lost first."""

    def place(candidate: Reclaimable) -> tuple[bool, float, str]:
        lives = candidate.lost_tokens is not None
        return lives, float(candidate.lost_tokens or 0) if lives else candidate.used_s, candidate.name

    chosen: list[Reclaimable] = []
    for candidate in sorted(candidates, key=place):
        if num_bytes <= 0:
            break
        chosen.append(candidate)
        num_bytes -= candidate.num_bytes
    return chosen
