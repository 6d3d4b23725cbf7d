"""Policies to compare with: serving alone, by turns without bounds, and all slack spent as a formula in the paper's notes reads.

They answer the same events as AdmissionController and protect nothing: for benchmarks and simulations, never for service.
"""

from __future__ import annotations

import dataclasses
import math

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
)
from common.serving.coserving.objectives import Objective, Objectives
from common.serving.coserving.step_time import StepTimePredictor


def _record(now_s: float) -> Record:
    return Record(now_s=now_s, reason=Reason.TURN, level=Level.OPEN, num_live=0, num_waiting=0)


class AlternatingPolicy:
    """A step of serving, a step of the rollout model, in turn, each as large as it comes; commits at once.

    Args:
        rollouts: off: serving alone.
    """

    def __init__(self, *, max_step_tokens: int, rollouts: bool = True) -> None:
        self._max_step_tokens, self._rollouts = max_step_tokens, rollouts
        self._last_side = Side.ROLLOUT
        self._serving_waits = False

    def priority_of(self, event: Arrived) -> int:
        """All are equal: first come, first served."""
        return 0

    def on_event(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        record = _record(now_s)
        match event:
            case Free():
                return (self._on_free(event, record),)
            case Planned(features=None):
                return (Serve(record=record) if self._serving_waits else Wait(record=record),)
            case Planned():
                return (Go(record=record),)
            case StepDone():
                self._last_side = event.side
        return ()

    def _on_free(self, event: Free, record: Record) -> Decision:
        self._serving_waits = event.serving is not None
        work = (event.rollout_waits or event.commit_waits) and self._rollouts
        if work and (not self._serving_waits or self._last_side is Side.SERVING):
            if event.parked:
                return Do(record=record, work=Work.ACTIVATE)
            if event.commit_waits:
                return Do(record=record, work=Work.SLICE)
            return Roll(record=record, max_tokens=self._max_step_tokens)
        return Serve(record=record) if self._serving_waits else Wait(record=record)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Live:
    objective: Objective
    arrival_s: float
    last_token_s: float | None = None


class AllSlackPolicy:
    """Rollouts while every live request's slack, predicted, stays positive: TTFT slack before the first token, then that of a gap.

    As design notes read it: (arrival + TTFT objective) - now - prefill, and (last token + TPOT objective) - now - decode step.
    """

    def __init__(self, objectives: Objectives, *, max_step_tokens: int) -> None:
        self._objectives, self._max_step_tokens = objectives, max_step_tokens
        self.predictors = {side: StepTimePredictor() for side in Side}
        self._live: dict[str, _Live] = {}
        self._slack_s = math.inf
        self._serving_waits = False

    def priority_of(self, event: Arrived) -> int:
        """All are equal: first come, first served."""
        return 0

    def on_event(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        match event:
            case Free():
                return (self._on_free(event, now_s),)
            case Planned():
                return (self._on_planned(event, now_s),)
            case Arrived():
                objective = self._objectives.of_request(event.model, event.request_class)
                self._live[event.request_id] = _Live(objective=objective, arrival_s=event.arrival_s)
            case Ended():
                self._live.pop(event.request_id, None)
            case StepDone():
                self.predictors[event.side].observe(event.features, event.duration_s)
                for request_id, _ in event.tokens:
                    if request_id in self._live:
                        self._live[request_id].last_token_s = now_s
        return ()

    def _on_free(self, event: Free, now_s: float) -> Decision:
        record = _record(now_s)
        self._serving_waits = event.serving is not None
        serving_s = 0.0 if event.serving is None else self.predictors[Side.SERVING].expected_s(event.serving)
        self._slack_s = min(
            (
                (live.arrival_s + live.objective.ttft_s if live.last_token_s is None else live.last_token_s + live.objective.tpot_s)
                - now_s
                - serving_s
                for live in self._live.values()
            ),
            default=math.inf,
        )
        if event.rollout_waits and self._slack_s > 0:
            return Roll(record=record, max_tokens=self._max_step_tokens)
        return Serve(record=record) if self._serving_waits else Wait(record=record)

    def _on_planned(self, event: Planned, now_s: float) -> Decision:
        record = _record(now_s)
        if event.features is not None and self.predictors[Side.ROLLOUT].expected_s(event.features) <= self._slack_s:
            return Go(record=record)
        return Serve(record=record) if self._serving_waits else Wait(record=record)
