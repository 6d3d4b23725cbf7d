"""What an admission policy is told and what it answers: plain values, so that a log of them replays.

Every event carries no time of its own; `on_event(event, now_s)` is given it. A decision carries the record that explains it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

from common.serving.coserving.step_time import StepFeatures


class Side(enum.StrEnum):
    """The two models of a device."""

    SERVING = "serving"
    ROLLOUT = "rollout"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """An online request; `arrival_s` may lie before now, when a step kept it from being seen."""

    request_id: str
    model: str
    request_class: str
    arrival_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """An online request is over; `whole` if it got all its tokens."""

    request_id: str
    whole: bool


class Work(enum.StrEnum):
    SLICE = "slice"
    PARK = "park"
    ACTIVATE = "activate"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Free:
    """The device holds no step: whose turn is it?

    serving: what serving's next step would be; None: it has nothing to do.
    rollout_waits: rollout requests are live. commit_waits: pieces of a commit of rollout weights are. parked: the rollout model is,
    at least in part. moving: the one of PARK and ACTIVATE of which pieces are left.
    """

    serving: StepFeatures | None
    rollout_waits: bool
    commit_waits: bool
    parked: bool
    moving: Work | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The rollout step planned within the newest Roll; None: it has nothing for one. Answered by Roll (smaller), Go or another."""

    features: StepFeatures | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepDone:
    """A step has left the device, `duration_s` after it was begun. `tokens`: how many each request got."""

    side: Side
    features: StepFeatures
    duration_s: float
    tokens: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkDone:
    """A piece of the rollout model's work other than steps has left the device: of a commit, of parking, of activating.

    last: after it the model is parked, or activated.
    """

    kind: Work
    duration_s: float
    last: bool = True


Event = Arrived | Ended | Free | Planned | StepDone | WorkDone


class Reason(enum.StrEnum):
    """Why a decision was taken."""

    WAITING_PROMPT = "a request waits for its first token"
    IDLE = "serving has nothing to do"
    SLACK = "every live request can wait that long"
    NO_SLACK = "a live request cannot wait for a decent rollout step"
    CAUTION = "caution: rollouts only when serving is idle"
    STOPPED = "caution: no rollouts"
    NO_ROLLOUT = "no rollout work"
    NOT_CALIBRATED = "step times are not known yet"
    DOES_NOT_FIT = "no rollout step fits into the budget"
    PROBE = "a smallest step, to learn step times again"
    UNUSED = "the rollout model has had no work for long"
    TURN = "by turns"


class Level(enum.IntEnum):
    """How much is dared: the higher, the less."""

    OPEN = 0
    IDLE_ONLY = 1
    STOPPED = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Why: the figures that a decision was taken on, in seconds. None: they played no part."""

    now_s: float
    reason: Reason
    level: Level
    num_live: int
    num_waiting: int
    budget_s: float | None = None
    slack_s: float | None = None
    tightest_request: str | None = None
    serving_bound_s: float | None = None
    rollout_bound_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Serve:
    """Run serving's planned step."""

    record: Record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Roll:
    """Plan a rollout step of at most `max_tokens` and say what it holds."""

    record: Record
    max_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Go:
    """Run the rollout step as planned."""

    record: Record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Do:
    """Do a piece of the rollout model's other work."""

    record: Record
    work: Work


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """Leave the device idle until something arrives, or until a time."""

    record: Record
    until_s: float | None = None


Decision = Serve | Roll | Go | Do | Wait


class AdmissionPolicy(Protocol):
    """Decides whose turn it is. Deterministic; owns no thread, socket or clock."""

    def on_event(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        """Exactly one decision for Free and Planned, none for other events."""
        ...

    def priority_of(self, event: Arrived) -> int:
        """Of an online request among the others, asked before the event: the engine serves the highest first.

        Raises:
            ValueError: its model or class has no objective.
        """
        ...
