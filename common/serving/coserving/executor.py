"""CoServingExecutor: one device, two engines, and asyncio callers of both: each model is an EngineLoop to whoever uses it.

Hand `drive(side, ...)` to a replica in place of a loop of its own: fronts and rollout workers then work unchanged. Everything
runs on the callers' event loop; while a step is on the device nothing else does, so HTTP belongs into another process. Invariant:
every `generate` returns its request's one Completion or raises, every commit happens once or its caller gets the error, and no
rollout step runs under weights that are half new.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

from common.clock import Clock, MonotonicClock
from common.errors import EngineClosedError
from common.serving.coserving.device import ClassOf, Commit, CoServedDevice, OnEvent, Turn
from common.serving.coserving.events import AdmissionPolicy, Side
from common.serving.coserving.objectives import ANY_CLASS
from common.serving.engine import StepEngine, StepLimits
from common.serving.loop import QUIET_PASSES, EngineLoop
from common.types import Request

WeightsT = TypeVar("WeightsT")
ResultT = TypeVar("ResultT")


class _Door:
    """What a loop's callers do to an engine, done through the executor, which has to know of it."""

    def __init__(self, executor: CoServingExecutor, side: Side) -> None:
        self._executor, self._side = executor, side

    def add(self, request: Request) -> None:
        self._executor.add(self._side, request)

    def abort(self, request_id: str) -> None:
        self._executor.abort(self._side, request_id)


class CoServedLoop(EngineLoop[WeightsT]):
    """One model's face: an EngineLoop whose steps the executor takes. Made by `CoServingExecutor.drive`."""

    def __init__(self, executor: CoServingExecutor, side: Side) -> None:
        super().__init__(cast(StepEngine[WeightsT], _Door(executor, side)), max_step_tokens=1)
        self._executor, self._side = executor, side
        self._arrived = executor.arrived

    async def __aenter__(self) -> CoServedLoop[WeightsT]:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for request_id in self._futures:
            self.engine.abort(request_id)
        self._fail_all(EngineClosedError("the co-serving executor was left with this request unfinished"))

    @property
    def num_open(self) -> int:
        return len(self._futures)

    async def between_steps(self, action: Callable[[], ResultT]) -> ResultT:
        results: list[ResultT] = []

        def slices() -> Iterator[None]:
            results.append(action())
            yield from ()

        await self.between_steps_in_slices(slices)
        return results[0]

    async def between_steps_in_slices(self, slices: Callable[[], Iterator[None]]) -> None:
        """Each piece is admitted like a step; this model takes no step until the last is done. See EngineLoop."""
        self._check_running("between_steps")
        await self._executor.commit(self._side, slices)

    def take(self, turn: Turn) -> None:
        """Hand what a turn brought to this model's callers."""
        for side, result in turn.results:
            if side is self._side:
                self.counters.prefill_tokens += turn.prefill_tokens if result is turn.results[-1][1] else 0
                self._deliver(result)

    def fail(self, error: EngineClosedError) -> None:
        self._fail_all(error)

    def _check_running(self, what: str) -> None:
        self._executor.check_running(what)


class CoServingExecutor:
    """See the module. `drive` both sides, then enter it before the replicas.

    Args:
        class_of: the class of an online request, by which its objective is found.
        on_event: see CoServedDevice.
    """

    def __init__(
        self,
        policy: AdmissionPolicy,
        *,
        serving_model: str,
        class_of: ClassOf = lambda _: ANY_CLASS,
        clock: Clock | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.arrived = asyncio.Event()
        self._policy, self._serving_model, self._class_of, self._on_event = policy, serving_model, class_of, on_event
        self._clock = clock or MonotonicClock()
        self._loops: dict[Side, CoServedLoop[Any]] = {}
        self._engines: dict[Side, StepEngine[Any]] = {}
        self._limits: dict[Side, StepLimits] = {}
        self._device: CoServedDevice | None = None
        self._commits: dict[Commit, asyncio.Future[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._looked_s: float | None = None
        """When arrivals were last looked for; None while nothing keeps them from being seen."""

    @property
    def device(self) -> CoServedDevice:
        assert self._device is not None, "the executor was not entered"
        return self._device

    @property
    def engines(self) -> Mapping[Side, StepEngine[Any]]:
        """Of the sides that are driven."""
        return self._engines

    @property
    def limits(self) -> Mapping[Side, StepLimits]:
        """Of their steps."""
        return self._limits

    def drive(self, side: Side) -> Callable[..., CoServedLoop[Any]]:
        """What makes a replica's loop: takes the same arguments as EngineLoop."""

        def make(engine: StepEngine[Any], *, max_step_tokens: int, tokens_per_sequence: int = 1) -> CoServedLoop[Any]:
            assert side not in self._loops, f"the {side} side is driven already"
            limits = StepLimits(max_tokens=max_step_tokens, tokens_per_sequence=tokens_per_sequence)
            self._limits[side], self._engines[side] = limits, engine
            self._loops[side] = CoServedLoop(self, side)
            return self._loops[side]

        return make

    async def __aenter__(self) -> CoServingExecutor:
        missing = [side for side in Side if side not in self._loops]
        if missing:
            raise ValueError(
                f"nothing drives {', '.join(missing)}: make both replicas with executor.drive(side) before entering it"
            )
        self._device = CoServedDevice(
            self._engines,
            self._policy,
            self._clock,
            limits=self._limits,
            serving_model=self._serving_model,
            class_of=self._class_of,
            on_event=self._on_event,
        )
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._fail(EngineClosedError("the co-serving executor was stopped"))

    def check_running(self, what: str) -> None:
        if self._task is None or self._task.done():
            raise EngineClosedError(f"{what}: the co-serving executor is not running")

    def add(self, side: Side, request: Request) -> None:
        self.device.add(side, request, arrival_s=self._looked_s)

    def abort(self, side: Side, request_id: str) -> None:
        if self._task is not None and not self._task.done():
            self.device.abort(side, request_id)
            self.arrived.set()

    async def commit(self, side: Side, slices: Callable[[], Iterator[None]]) -> None:
        """Queue a commit and wait for its end; cancelling the call withdraws it."""
        commit = self.device.commit(side, slices)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits[commit] = future
        self.arrived.set()
        try:
            await future
        finally:
            if self._commits.pop(commit, None) is not None and not commit.ended:
                self.device.withdraw(commit)
                self.arrived.set()

    async def _run(self) -> None:
        try:
            while True:
                await self._settle()
                turn = self.device.turn()
                for loop in self._loops.values():
                    loop.take(turn)
                for commit in turn.commits:
                    self._end(commit)
                if turn.waits:
                    await self._wait(turn.until_s)
        except Exception as error:
            closed = EngineClosedError(f"an engine of this device failed: {error}")
            closed.__cause__ = error
            self._fail(closed)

    async def _settle(self) -> None:
        """Let callers run until a pass over the event loop brings nothing new: what they submit then shares the next step."""
        num_quiet = 0
        while num_quiet < QUIET_PASSES:
            before = sum(loop.num_open for loop in self._loops.values())
            self.arrived.clear()
            await asyncio.sleep(0)
            quiet = not self.arrived.is_set() and sum(loop.num_open for loop in self._loops.values()) == before
            num_quiet = num_quiet + 1 if quiet else 0
        self._looked_s = self._clock.now_s()

    async def _wait(self, until_s: float | None) -> None:
        self._looked_s = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if until_s is None else max(0.0, until_s - self._clock.now_s())):
                await self.arrived.wait()

    def _end(self, commit: Commit) -> None:
        future = self._commits.pop(commit, None)
        if future is None or future.done():
            return
        if commit.error is not None:
            future.set_exception(commit.error)
        else:
            future.set_result(None)

    def _fail(self, error: EngineClosedError) -> None:
        for loop in self._loops.values():
            loop.fail(error)
        for future in self._commits.values():
            if not future.done():
                future.set_exception(error)
