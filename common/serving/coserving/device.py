"""CoServedDevice: two engines, one device, one step at a time. Asks the policy whose turn it is and does what it says.

Synchronous and without callers of its own: executor.py drives it for asyncio callers, simulation.py in virtual time. Commits of
weights are queues of pieces: those of the rollout model are admitted one by one, with serving steps between them and no rollout
step; those of the serving model run at once, since every online request waits for them. Invariant: at most one step is on the
device, and a commit, a park or the other engine's step is begun only after the engine that had it is drained.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from common.clock import Clock
from common.serving.coserving.events import (
    AdmissionPolicy,
    Arrived,
    Decision,
    Do,
    Ended,
    Event,
    Free,
    Go,
    Planned,
    Roll,
    Serve,
    Side,
    StepDone,
    Wait,
    Work,
    WorkDone,
)
from common.serving.coserving.step_time import StepFeatures
from common.serving.engine import StepEngine, StepLimits, StepPlan, StepResult
from common.types import Completion, FinishReason, Request

ClassOf = Callable[[Request], str]
"""The class of an online request, by which its objective is found."""
OnEvent = Callable[[Event, float, tuple[Decision, ...]], None]


log = logging.getLogger(__name__)

_END = object()


@runtime_checkable
class Parkable(Protocol):
    """An engine that can give up what it holds for running while it does not run. Call both after `drain`.

    Both go piece by piece, each short; parking that is given up in between is followed by an activation.
    """

    def park(self) -> Iterator[object]: ...

    def activate(self) -> Iterator[object]: ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Commit:
    """New weights of one model, in pieces. `done` once all are in place; `error` if they are not, then the old ones are whole."""

    side: Side
    slices: Callable[[], Iterator[None]]
    pieces: Iterator[None] | None = None
    done: bool = False
    error: Exception | None = None
    started_s: float | None = None
    duration_s: float | None = None

    @property
    def ended(self) -> bool:
        return self.done or self.error is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One thing that was done: results of steps by side, commits that ended, or until when there is nothing to do.

    `prefill_tokens` are those of the step that ran, whose result is the last.
    """

    results: tuple[tuple[Side, StepResult], ...] = ()
    prefill_tokens: int = 0
    commits: tuple[Commit, ...] = ()
    waits: bool = False
    until_s: float | None = None


class CoServedDevice:
    """See the module.

    Args:
        limits: of a step, by side; the policy lowers those of rollout steps.
        serving_model: by which objectives are found.
        on_event: called with every event, its time and the decisions it led to: for logs.
    """

    def __init__(
        self,
        engines: dict[Side, StepEngine[Any]],
        policy: AdmissionPolicy,
        clock: Clock,
        *,
        limits: dict[Side, StepLimits],
        serving_model: str,
        class_of: ClassOf,
        on_event: OnEvent | None = None,
    ) -> None:
        self.engines, self.policy, self.limits, self._clock = engines, policy, limits, clock
        self._serving_model, self._class_of, self._listener = serving_model, class_of, on_event
        self._commits: dict[Side, collections.deque[Commit]] = {side: collections.deque() for side in Side}
        self._num_live = dict.fromkeys(Side, 0)
        self._last_side: Side | None = None
        self._serving_plan: StepPlan | None = None
        self._plan_is_old = True
        self._parked = False
        """From the first piece of parking to the last of activating."""
        self._pieces: tuple[Work, Iterator[object]] | None = None
        """Those left of the parking or activating under way."""
        self._online: set[str] = set()
        self.seconds = dict.fromkeys((*Side, *Work), 0.0)
        """Spent on each kind of work."""

    @property
    def parked(self) -> bool:
        """Whether the rollout model is."""
        return self._parked

    def num_live(self, side: Side) -> int:
        """Requests that were added and have not ended."""
        return self._num_live[side]

    def add(self, side: Side, request: Request, *, arrival_s: float | None = None) -> None:
        """Queue a request. Raises RequestRejectedError, or ValueError if its class has no objective."""
        now_s = self._clock.now_s()
        if side is Side.ROLLOUT:
            self.engines[side].add(request)
        else:
            event = Arrived(
                request_id=request.request_id,
                model=self._serving_model,
                request_class=self._class_of(request),
                arrival_s=now_s if arrival_s is None else arrival_s,
            )
            self.engines[side].add(dataclasses.replace(request, priority=self.policy.priority_of(event)))
            self._online.add(request.request_id)
            self._plan_is_old = True
            self._tell(event, now_s)
        self._num_live[side] += 1

    def abort(self, side: Side, request_id: str) -> None:
        self.engines[side].abort(request_id)
        self._plan_is_old |= side is Side.SERVING

    def commit(self, side: Side, slices: Callable[[], Iterator[None]]) -> Commit:
        """Queue a commit; it ends in some later turn."""
        commit = Commit(side=side, slices=slices)
        self._commits[side].append(commit)
        return commit

    def withdraw(self, commit: Commit) -> None:
        """Give up a commit that has not ended: its weights stay as they were."""
        if commit in self._commits[commit.side]:
            self._commits[commit.side].remove(commit)
            _close(commit)

    def turn(self) -> Turn:
        """Do the next thing. Blocks for at most one step or one piece of other work.

        Raises:
            Exception: what an engine raised; the device is then of no use. Errors of commits go to their Commit.
        """
        if self._commits[Side.SERVING]:
            return self._commit_serving()
        serving = self._plan_serving()
        if serving is None and self._num_live[Side.SERVING]:
            raise _never_runs(Side.SERVING, self.limits[Side.SERVING], self._num_live[Side.SERVING])
        event = Free(
            serving=None if serving is None else StepFeatures.of(serving),
            rollout_waits=self._num_live[Side.ROLLOUT] > 0,
            commit_waits=bool(self._commits[Side.ROLLOUT]),
            parked=self._parked,
            moving=None if self._pieces is None else self._pieces[0],
        )
        decision = self._ask(event)
        while isinstance(decision, Roll):
            limits = self.limits[Side.ROLLOUT]
            limits = dataclasses.replace(limits, max_tokens=min(decision.max_tokens, limits.max_tokens))
            rollout = self.engines[Side.ROLLOUT].plan(limits)
            decision = self._ask(Planned(features=None if rollout is None else StepFeatures.of(rollout)))
            if isinstance(decision, Go):
                assert rollout is not None, "the policy lets a rollout step run that there is no plan for"
                return self._run(Side.ROLLOUT, rollout)
        match decision:
            case Serve():
                assert serving is not None, "the policy lets serving run, which has nothing to do"
                return self._run(Side.SERVING, serving)
            case Do(work=work):
                return self._do(work)
            case Wait(until_s=until_s):
                return Turn(waits=True, until_s=until_s)
        raise AssertionError(f"the policy answered {decision}")

    def _plan_serving(self) -> StepPlan | None:
        if self._plan_is_old:
            self._serving_plan = self.engines[Side.SERVING].plan(self.limits[Side.SERVING])
            self._plan_is_old = False
        return self._serving_plan

    def _run(self, side: Side, plan: StepPlan) -> Turn:
        before = self._drain_other(side)
        engine, features = self.engines[side], StepFeatures.of(plan)
        started_s = self._clock.now_s()
        engine.submit(plan)
        result = engine.collect()
        now_s = self._clock.now_s()
        self._plan_is_old |= side is Side.SERVING
        self.seconds[side] += now_s - started_s
        counts = collections.Counter(token.request_id for token in result.tokens) if side is Side.SERVING else {}
        self._tell(StepDone(side=side, features=features, duration_s=now_s - started_s, tokens=tuple(counts.items())), now_s)
        self._count_ends(side, result.completions, now_s)
        return Turn(results=(*before, (side, result)), prefill_tokens=plan.prefill_tokens)

    def _drain_other(self, side: Side) -> tuple[tuple[Side, StepResult], ...]:
        """Switch to `side`: what the other engine still had to say."""
        last, self._last_side = self._last_side, side
        return self._drain(last) if last is not None and last is not side else ()

    def _drain(self, side: Side) -> tuple[tuple[Side, StepResult], ...]:
        result = self.engines[side].drain()
        if result is None:
            return ()
        self._plan_is_old |= side is Side.SERVING
        self._count_ends(side, result.completions, self._clock.now_s())
        return ((side, result),)

    def _do(self, work: Work) -> Turn:
        """A piece of the rollout model's other work."""
        before = tuple(result for side in Side for result in self._drain(side))
        started_s = self._clock.now_s()
        commits: tuple[Commit, ...] = ()
        last = True
        if work is Work.SLICE:
            commits = self._slice(self._commits[Side.ROLLOUT])
        else:
            last = self._park_or_activate(work)
        self._last_side = Side.ROLLOUT
        now_s = self._clock.now_s()
        self.seconds[work] += now_s - started_s
        self._tell(WorkDone(kind=work, duration_s=now_s - started_s, last=last), now_s)
        return Turn(results=before, commits=commits)

    def _park_or_activate(self, work: Work) -> bool:
        """A piece of it; whether that was the last. Where it fails all contents are right, only not where they should be."""
        engine = self.engines[Side.ROLLOUT]
        if self._pieces is None or self._pieces[0] is not work:
            if isinstance(engine, Parkable):
                self._pieces = (work, engine.park() if work is Work.PARK else engine.activate())
            else:
                self._pieces = (work, iter(()))
            self._parked = True
        try:
            if next(self._pieces[1], _END) is not _END:
                return False
            moved = True
        except OSError as error:
            log.warning("the rollout model %s was not moved whole (%s): %s", engine.info.name, work, error)
            moved = work is Work.ACTIVATE  # then its pages become memory when they are used
        self._pieces = None
        self._parked = work is Work.PARK
        return moved

    def _commit_serving(self) -> Turn:
        before = tuple(result for side in Side for result in self._drain(side))
        commits: tuple[Commit, ...] = ()
        while not commits:
            commits = self._slice(self._commits[Side.SERVING])
        self._plan_is_old = True
        return Turn(results=before, commits=commits)

    def _slice(self, queue: collections.deque[Commit]) -> tuple[Commit, ...]:
        """One piece of the first commit in line; the commit, if that was its last."""
        commit = queue[0]
        if commit.started_s is None:
            commit.started_s = self._clock.now_s()
        try:
            if commit.pieces is None:
                commit.pieces = commit.slices()
            next(commit.pieces)
            return ()
        except StopIteration:
            commit.done = True
        except Exception as error:
            commit.error = error
        queue.popleft()
        commit.duration_s = self._clock.now_s() - commit.started_s
        return (commit,)

    def _count_ends(self, side: Side, completions: tuple[Completion, ...], now_s: float) -> None:
        self._num_live[side] -= len(completions)
        for completion in completions:
            if completion.request_id in self._online and side is Side.SERVING:
                self._online.remove(completion.request_id)
                whole = completion.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                self._tell(Ended(request_id=completion.request_id, whole=whole), now_s)

    def _ask(self, event: Event) -> Decision:
        (decision,) = self._tell(event, self._clock.now_s())
        return decision

    def _tell(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        decisions = self.policy.on_event(event, now_s)
        if self._listener is not None:
            self._listener(event, now_s, decisions)
        return decisions


def _never_runs(side: Side, limits: StepLimits, num_live: int) -> ValueError:
    return ValueError(
        f"no {side} step of at most max_step_tokens={limits.max_tokens} can hold any of the {num_live} requests that wait; raise "
        "max_step_tokens to the longest prompt at least"
    )


def _close(commit: Commit) -> None:
    close = getattr(commit.pieces, "close", None)
    if close is not None:
        close()
