"""DeviceStatistics: sums over everything a co-serving device decided and did, for metrics and reports.

Listens as DecisionTrace does, keeps no event, and changes no decision. Invariants: sums only grow; the seconds of all levels
together are the time from the first decision to the moment of the report.
"""

from __future__ import annotations

import collections
import dataclasses

from common.serving.coserving.admission import AdmissionController
from common.serving.coserving.events import Decision, Event, Level, Side, StepDone, Work, WorkDone

LEVEL_NAMES = {level: level.name.lower() for level in Level}
"""open, idle_only, stopped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """Plain values, so that it passes between processes.

    Args:
        level: of caution, a value of LEVEL_NAMES.
        level_s: seconds spent in each level.
        device_s: seconds of each kind of work: serving, rollout (steps), slice (of a commit), park, activate.
        num_done: how many of each kind of work.
        decisions: how often each was taken, by "kind: reason".
        step_time_error: by side, the 90th percentile of |actual / predicted - 1|; a side that is not known yet is left out.
    """

    level: str
    parked: bool
    level_s: dict[str, float]
    device_s: dict[str, float]
    num_done: dict[str, int]
    decisions: dict[str, int]
    step_time_error: dict[str, float]


class DeviceStatistics:
    """See the module. Pass `listen` as a device's `on_event`; `policy` is asked for its errors of prediction."""

    def __init__(self, policy: AdmissionController) -> None:
        self._policy = policy
        self._level = Level.OPEN
        self._level_since_s: float | None = None
        self._parked = False
        self._level_s = dict.fromkeys(LEVEL_NAMES.values(), 0.0)
        self._device_s = {kind.value: 0.0 for kind in (*Side, *Work)}
        self._num_done = dict.fromkeys(self._device_s, 0)
        self._decisions: collections.Counter[str] = collections.Counter()

    def listen(self, event: Event, now_s: float, decisions: tuple[Decision, ...]) -> None:
        match event:
            case StepDone(side=side, duration_s=duration_s):
                self._add(side.value, duration_s)
            case WorkDone(kind=work, duration_s=duration_s, last=last):
                self._add(work.value, duration_s, num_done=int(last))
                self._parked = work is Work.PARK or (self._parked and not (work is Work.ACTIVATE and last))
        for decision in decisions:
            self._decisions[f"{type(decision).__name__.lower()}: {decision.record.reason}"] += 1
            self._pass_time(now_s)
            self._level = decision.record.level

    def report(self, now_s: float) -> DeviceReport:
        """As of now."""
        self._pass_time(now_s)
        predictors = self._policy.predictors.items()
        return DeviceReport(
            level=LEVEL_NAMES[self._level],
            parked=self._parked,
            level_s=dict(self._level_s),
            device_s=dict(self._device_s),
            num_done=dict(self._num_done),
            decisions=dict(self._decisions),
            step_time_error={side.value: predictor.error() for side, predictor in predictors if predictor.ready},
        )

    def _add(self, kind: str, duration_s: float, num_done: int = 1) -> None:
        self._device_s[kind] += duration_s
        self._num_done[kind] += num_done

    def _pass_time(self, now_s: float) -> None:
        """What has passed was spent in the level of the newest decision."""
        if self._level_since_s is not None:
            self._level_s[LEVEL_NAMES[self._level]] += now_s - self._level_since_s
        self._level_since_s = now_s
