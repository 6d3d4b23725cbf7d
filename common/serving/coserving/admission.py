"""AdmissionController: decides, step by step, whether serving or the rollout model has the device, and for how long.

A rollout step is admitted only if its predicted end leaves every live online request on schedule. The rules, each of which keeps a
measured failure away (docs/coserving.md has the derivation):
  1. While a live request waits for its first token, serving runs: TTFT slack is never spent.
  2. No rollout step is expected to take longer than a share of the shortest TTFT objective, also when serving is idle: whatever
     arrives meanwhile waits for it.
  3. A decoding request may be kept waiting until its next token is due: tokens are scheduled at `tpot_share` of the objective, and
     early enough that the mean still meets it if every later step were the longest serving step there is.
  4. A rollout step that would mostly pay fixed costs, or compute padding, is not worth a delay; it waits until serving is idle.
  5. Surprises and misses lower the level (caution.py): rollouts when idle only, then none.
Deterministic: no thread, socket or clock. Invariant: exactly one decision for each Free and Planned, none for anything else.
"""

from __future__ import annotations

import dataclasses
import math

from common.serving.coserving.caution import Caution, CautionSettings
from common.serving.coserving.events import (
    Arrived,
    Decision,
    Do,
    Ended,
    Event,
    Free,
    Go,
    Level,
    Planned,
    Reason,
    Record,
    Roll,
    Serve,
    Side,
    StepDone,
    Wait,
    Work,
    WorkDone,
)
from common.serving.coserving.live_requests import LiveRequests
from common.serving.coserving.objectives import Objectives
from common.serving.coserving.step_time import StepFeatures, StepTimePredictor


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """See the module. Shares are of the objective named.

    Args:
        spend_slack: off: rollouts run only when serving is idle.
        step_share: of the shortest TTFT objective, bounds a rollout step.
        tpot_share: of the TPOT objective, at which tokens are scheduled while rollouts run.
        max_tpot_rise: a token may be kept waiting for at most this many times the serving step that makes it; bounds how far the
            median TPOT rises above that of serving alone.
        max_fixed_share: of a rollout step's budget that fixed costs may take while serving waits; likewise how much smaller than
            usual the share of its tokens may be that are no padding.
        max_step_tokens: of a rollout step, whatever its budget.
        surprise_tolerance: a rollout step surprises when it takes so much longer than its bound, whatever it was admitted for.
        probe_after_s: after no rollout step has fitted for so long, a smallest one is tried as soon as serving is idle, and slack
            that was of no use is tried again.
        park_after_s: without rollout work, after which the model is parked.
    """

    spend_slack: bool = True
    step_share: float = 0.35
    tpot_share: float = 0.6
    max_tpot_rise: float = 50.0
    max_fixed_share: float = 0.35
    max_step_tokens: int = 2048
    surprise_tolerance: float = 0.15
    probe_after_s: float = 2.0
    park_after_s: float = 60.0
    quantile: float = 0.99
    caution: CautionSettings = dataclasses.field(default_factory=CautionSettings)

    def __post_init__(self) -> None:
        for name in ("step_share", "tpot_share", "max_fixed_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in (0, 1]")
        if self.max_tpot_rise < 1:
            raise ValueError(f"max_tpot_rise={self.max_tpot_rise} must be at least 1: serving's own step takes that long")
        if self.max_step_tokens < 1:
            raise ValueError(f"max_step_tokens={self.max_step_tokens} must be at least 1")


MAX_REPLANS = 3
"""A rollout step is planned anew so often to fit its budget while serving waits; then the turn is given up, since planning costs
time as well. On an idle device it becomes smaller until it fits."""
WINDOW_PIECES = 16
USUAL_WEIGHT = 0.1
"""Of the newest step in idle time, in what share of a step is usually useful."""


class AdmissionController:
    """See the module and events.AdmissionPolicy.

    Args:
        longest_serving_step: features of the largest step that serving's limits allow.
    """

    def __init__(
        self, objectives: Objectives, settings: AdmissionSettings | None = None, *, longest_serving_step: StepFeatures
    ) -> None:
        self.settings = settings or AdmissionSettings()
        self.objectives = objectives
        self.predictors = {side: StepTimePredictor(quantile=self.settings.quantile) for side in Side}
        self.caution = Caution(self.settings.caution)
        self.step_bound_s = self.settings.step_share * objectives.shortest_ttft_s
        self._longest_serving_step = longest_serving_step
        self._live = LiveRequests(tpot_share=self.settings.tpot_share, max_rise=self.settings.max_tpot_rise)
        self._last_side: Side | None = None
        self._budget: Record | None = None
        self._max_tokens = self._num_replans = 0
        self._least_tokens = self._probe_tokens = 1
        self._probing = False
        self._last_rollout: StepFeatures | None = None
        self._unfit_s, self._unfit_until_s = 0.0, 0.0
        """Until then, and until the next rollout step, less slack than that is of no use: it is not worth planning for."""
        self._usual_share = 0.0
        self._slices_s: list[float] = []
        self._activations_s: list[float] = []
        self._starved_since_s: float | None = None
        """Since when no rollout step has fitted although serving was idle; arrivals in between change nothing about it."""
        self._unused_since_s: float | None = None

    @property
    def num_live(self) -> int:
        return len(self._live)

    def on_event(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        match event:
            case Free():
                return (self._on_free(event, now_s),)
            case Planned():
                return (self._on_planned(event, now_s),)
            case StepDone():
                self._on_step(event, now_s)
            case Arrived():
                objective = self.objectives.of_request(event.model, event.request_class)
                self._live.add(event.request_id, objective, event.arrival_s)
            case Ended():
                outcome = self._live.end(event.request_id, whole=event.whole)
                if outcome is not None:
                    self.caution.on_end(missed=outcome.missed, blamed=outcome.blamed, now_s=now_s)
            case WorkDone():
                self._on_work(event)
        return ()

    def priority_of(self, event: Arrived) -> int:
        """Earliest deadline first (Liu and Layland 1973, section 7): short prompts, whose objectives are short, pass long ones."""
        objective = self.objectives.of_request(event.model, event.request_class)
        return -round(1e6 * (event.arrival_s + objective.ttft_s))

    # Deciding

    def _on_free(self, event: Free, now_s: float) -> Decision:
        level = self._level(now_s)
        serving = event.serving
        if serving is not None and serving.num_tokens == 0:  # only ends to report: costs nothing
            return Serve(record=self._record(now_s, Reason.IDLE, level))
        has_work = event.rollout_waits or event.commit_waits
        self._unused_since_s = None if has_work else (now_s if self._unused_since_s is None else self._unused_since_s)
        if serving is not None:
            reason = self._why_serve_now(event, has_work, level)
            if reason is not None:
                return Serve(record=self._record(now_s, reason, level))
            return self._borrow(event, serving, now_s, level)
        if not has_work:
            return self._park_or_wait(event, now_s, level)
        if level is Level.STOPPED:
            return Wait(record=self._record(now_s, Reason.STOPPED, level), until_s=self.caution.until_s())
        record = self._record(now_s, Reason.IDLE, level, budget_s=self.step_bound_s)
        return self._admit(event, record)

    def _level(self, now_s: float) -> Level:
        level = self.caution.level(now_s)
        return max(level, Level.IDLE_ONLY) if not self.settings.spend_slack else level

    def _why_serve_now(self, event: Free, has_work: bool, level: Level) -> Reason | None:
        """Why serving's step goes first whatever the slack, or None."""
        if not has_work:
            return Reason.NO_ROLLOUT
        if self._live.num_waiting:
            return Reason.WAITING_PROMPT
        if level is not Level.OPEN:
            return Reason.CAUTION if level is Level.IDLE_ONLY else Reason.STOPPED
        if not all(predictor.ready for predictor in self.predictors.values()):
            return Reason.NOT_CALIBRATED
        return None

    def _borrow(self, event: Free, serving: StepFeatures, now_s: float, level: Level) -> Decision:
        """Spend the slack of decoding requests, if it is enough for a decent rollout step."""
        predictor = self.predictors[Side.SERVING]
        serving_s = predictor.bound_s(dataclasses.replace(serving, switched=True))
        tightest, due_s = self._live.tightest(serving_s, predictor.bound_s(self._longest_serving_step))
        slack_s = due_s - now_s - serving_s
        record = self._record(
            now_s,
            Reason.SLACK,
            level,
            budget_s=min(slack_s, self.step_bound_s),
            slack_s=slack_s,
            tightest_request=tightest,
            serving_bound_s=serving_s,
        )
        assert record.budget_s is not None
        if record.budget_s <= 0:
            return Serve(record=dataclasses.replace(record, reason=Reason.NO_SLACK))
        if not (event.parked or event.commit_waits):  # pieces of those are judged by themselves
            if self._fixed_s(idle=False) > self.settings.max_fixed_share * record.budget_s:
                return Serve(record=dataclasses.replace(record, reason=Reason.NO_SLACK))
            if record.budget_s < self._unfit_s and now_s < self._unfit_until_s:
                return Serve(record=dataclasses.replace(record, reason=Reason.DOES_NOT_FIT, rollout_bound_s=self._unfit_s))
        return self._admit(event, record)

    def _admit(self, event: Free, record: Record) -> Decision:
        """Give the rollout model the device for at most `record.budget_s`: other work of its first, then a step."""
        budget_s = record.budget_s
        assert budget_s is not None
        idle = event.serving is None
        if event.parked:
            piece_s = max(self._activations_s, default=math.inf)
            if idle or piece_s <= budget_s:
                return Do(record=record, work=Work.ACTIVATE)
            return Serve(record=dataclasses.replace(record, reason=Reason.DOES_NOT_FIT))
        if event.commit_waits:  # no rollout step may run before it is whole
            slice_s = max(self._slices_s, default=math.inf)
            if idle or slice_s <= budget_s:
                return Do(record=dataclasses.replace(record, rollout_bound_s=slice_s if self._slices_s else None), work=Work.SLICE)
            return Serve(record=dataclasses.replace(record, reason=Reason.DOES_NOT_FIT))
        self._budget, self._num_replans = record, 0
        self._max_tokens = self._tokens_within(budget_s, idle=idle)
        return Roll(record=record, max_tokens=self._max_tokens)

    def _tokens_within(self, budget_s: float, *, idle: bool) -> int:
        """About how many tokens a rollout step may hold, judging by the newest one; what is planned is checked afterwards."""
        most, last, predictor = self.settings.max_step_tokens, self._last_rollout, self.predictors[Side.ROLLOUT]
        if not predictor.ready:
            return min(most, self._least_tokens)
        if last is None:
            return most
        fixed_s = self._fixed_s(idle=idle)
        variable_s = self._time_s(last, idle=idle) - fixed_s
        room_s = budget_s - fixed_s
        if variable_s <= 0 or room_s <= 0:
            return most
        return max(self._least_tokens, min(most, math.ceil(last.num_tokens * room_s / variable_s)))

    def _time_s(self, features: StepFeatures, *, idle: bool) -> float:
        """What a rollout step is admitted for: its bound where a live request would pay, its expectation where one might come."""
        predictor = self.predictors[Side.ROLLOUT]
        return predictor.drift * predictor.expected_s(features) if idle else predictor.bound_s(features)

    def _fixed_s(self, *, idle: bool) -> float:
        predictor = self.predictors[Side.ROLLOUT]
        return predictor.drift * predictor.fixed_s if idle else predictor.margin * predictor.fixed_s

    def _on_planned(self, event: Planned, now_s: float) -> Decision:
        record, features = self._budget, event.features
        assert record is not None, "Planned without a Roll"
        assert record.budget_s is not None
        idle = record.slack_s is None
        if features is None:
            return self._on_empty_plan(record, now_s)
        if features.num_tokens == 0:  # only ends to report
            return Go(record=record)
        predictor = self.predictors[Side.ROLLOUT]
        if not predictor.ready:
            return Go(record=dataclasses.replace(record, reason=Reason.NOT_CALIBRATED))
        if self._last_side is Side.SERVING:
            features = dataclasses.replace(features, switched=True)
        time_s = self._time_s(features, idle=idle)
        planned = dataclasses.replace(record, rollout_bound_s=predictor.bound_s(features))
        if time_s <= record.budget_s:
            if idle or features.useful_share >= (1 - self.settings.max_fixed_share) * self._usual_share:
                return Go(record=planned)
            self._unfit_s, self._unfit_until_s = record.budget_s, now_s + self.settings.probe_after_s
            return self._give_up(planned, Reason.NO_SLACK, now_s)
        can_shrink = min(features.num_tokens, self._max_tokens) > self._least_tokens
        if (idle or self._num_replans < MAX_REPLANS) and can_shrink:
            fixed_s = self._fixed_s(idle=idle)
            share = 0.95 * max(0.0, min(1.0, (record.budget_s - fixed_s) / max(1e-9, time_s - fixed_s)))
            if self._num_replans:
                share = min(share, 0.5)  # it is no line: an engine that pads needs the next smaller shape
            self._num_replans += 1
            self._max_tokens = max(self._least_tokens, int(share * min(features.num_tokens, self._max_tokens)))
            return Roll(record=planned, max_tokens=self._max_tokens)
        if idle and self._probes(now_s):
            if features.num_tokens > self._probe_tokens and self._max_tokens > self._probe_tokens:
                self._max_tokens = self._probe_tokens
                return Roll(record=record, max_tokens=self._max_tokens)
            self._probing = True
            return Go(record=dataclasses.replace(planned, reason=Reason.PROBE))
        if not idle:
            self._unfit_s, self._unfit_until_s = time_s, now_s + self.settings.probe_after_s
        return self._give_up(planned, Reason.DOES_NOT_FIT, now_s)

    def _on_empty_plan(self, record: Record, now_s: float) -> Decision:
        """No step of so few tokens holds anything: remember that, and try larger ones."""
        if self._max_tokens >= self.settings.max_step_tokens:
            self._least_tokens = self._probe_tokens = 1
            return self._give_up(record, Reason.NO_ROLLOUT, now_s)
        self._max_tokens = self._least_tokens = min(self.settings.max_step_tokens, 2 * self._max_tokens)
        self._probe_tokens = max(self._probe_tokens, self._least_tokens)
        return Roll(record=record, max_tokens=self._max_tokens)

    def _give_up(self, record: Record, reason: Reason, now_s: float) -> Decision:
        """The turn goes to serving, or to nobody."""
        record = dataclasses.replace(record, reason=reason)
        if record.slack_s is not None:
            return Serve(record=record)
        if reason is not Reason.DOES_NOT_FIT:
            return Wait(record=record, until_s=now_s + self.settings.probe_after_s)
        if self._starved_since_s is None:
            self._starved_since_s = now_s
        return Wait(record=record, until_s=max(now_s, self._starved_since_s + self.settings.probe_after_s))

    def _probes(self, now_s: float) -> bool:
        """Whether a step may run that does not fit as predicted: after long, then as long as the last one did fit, ever larger."""
        if self._probe_tokens > self._least_tokens:
            return True
        return self._starved_since_s is not None and now_s - self._starved_since_s >= self.settings.probe_after_s

    def _park_or_wait(self, event: Free, now_s: float, level: Level) -> Decision:
        record = self._record(now_s, Reason.NO_ROLLOUT, level)
        if event.moving is Work.PARK:
            return Do(record=dataclasses.replace(record, reason=Reason.UNUSED), work=Work.PARK)
        if event.parked and event.moving is None:
            return Wait(record=record)
        assert self._unused_since_s is not None
        park_s = self._unused_since_s + self.settings.park_after_s
        if now_s < park_s:
            return Wait(record=record, until_s=park_s)
        return Do(record=dataclasses.replace(record, reason=Reason.UNUSED), work=Work.PARK)

    def _record(
        self,
        now_s: float,
        reason: Reason,
        level: Level,
        *,
        budget_s: float | None = None,
        slack_s: float | None = None,
        tightest_request: str | None = None,
        serving_bound_s: float | None = None,
    ) -> Record:
        return Record(
            now_s=now_s,
            reason=reason,
            level=level,
            num_live=len(self._live),
            num_waiting=self._live.num_waiting,
            budget_s=budget_s,
            slack_s=slack_s,
            tightest_request=tightest_request,
            serving_bound_s=serving_bound_s,
        )

    # Learning

    def _on_step(self, event: StepDone, now_s: float) -> None:
        side, features = event.side, event.features
        if self._last_side is not None and self._last_side is not side:
            features = dataclasses.replace(features, switched=True)
        predictor = self.predictors[side]
        if side is Side.ROLLOUT and features.num_tokens:
            limit_s = predictor.bound_s(features) if predictor.ready else math.inf
            surprised = event.duration_s > limit_s * (1 + self.settings.surprise_tolerance)
            self.caution.on_step(surprised=surprised, now_s=now_s)
            self._last_rollout, self._unfit_s = event.features, 0.0
            if self._budget is not None and self._budget.slack_s is None:
                self._usual_share += USUAL_WEIGHT * (features.useful_share - self._usual_share)
            fits = self._probing and event.duration_s <= self.step_bound_s
            self._probe_tokens = 2 * self._probe_tokens if fits else self._least_tokens
            self._probing = False
            self._starved_since_s = None
        predictor.observe(features, event.duration_s)
        if features.num_tokens:
            self._last_side = side
        if side is Side.ROLLOUT:
            self._live.lend(event.duration_s)
            return
        for request_id, num_tokens in event.tokens:
            self._live.on_tokens(request_id, num_tokens, now_s)

    def _on_work(self, event: WorkDone) -> None:
        self._live.lend(event.duration_s)
        self._last_side = Side.ROLLOUT
        if event.kind is Work.SLICE:
            self._slices_s = [*self._slices_s[1 - WINDOW_PIECES :], event.duration_s]
        elif event.kind is Work.ACTIVATE:
            self._activations_s = [*self._activations_s[1 - WINDOW_PIECES :], event.duration_s]
