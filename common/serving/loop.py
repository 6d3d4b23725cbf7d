"""EngineLoop: drives one StepEngine for many asynchronous callers.

Runs on the callers' event loop and takes a step only once every caller that can run has run, so that with callers that wait for
nothing else, what shares a step depends on the requests alone and not on the clock: a run repeats bit for bit.
Invariant: every `generate` returns its request's one Completion or raises, and every action runs once or its caller gets the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Generic, TypeVar

from common.errors import EngineClosedError
from common.serving.engine import StepEngine, StepLimits, StepResult
from common.types import Completion, Request

WeightsT = TypeVar("WeightsT")
ResultT = TypeVar("ResultT")


@dataclasses.dataclass(kw_only=True)
class LoopCounters:
    """Sums since the loop was made."""

    num_steps: int = 0
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    device_s: float = 0.0

    def since(self, before: LoopCounters) -> LoopCounters:
        """What was added after `before`, an earlier copy."""
        fields = dataclasses.fields(self)
        return LoopCounters(**{field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields})


class EngineLoop(Generic[WeightsT]):
    """Use as `async with EngineLoop(engine, max_step_tokens=...) as loop: await loop.generate(request)`. See StepLimits."""

    def __init__(self, engine: StepEngine[WeightsT], *, max_step_tokens: int, tokens_per_sequence: int = 1) -> None:
        self.engine = engine
        self.counters = LoopCounters()
        self.on_step: Callable[[StepResult], None] | None = None
        """Called with every step's result, before its requests' callers go on: for callers that stream."""
        self._limits = StepLimits(max_tokens=max_step_tokens, tokens_per_sequence=tokens_per_sequence)
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._abandoned: dict[str, asyncio.Future[None]] = {}
        """Requests whose callers were cancelled, until the engine reports their end."""
        self._actions: list[tuple[Callable[[], Awaitable[None]], asyncio.Future[Any]]] = []
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EngineLoop[WeightsT]:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._fail_all(EngineClosedError("the engine loop was stopped with this request unfinished"))

    async def generate(self, request: Request) -> Completion:
        """Run one request to its end. Cancelling the call aborts the request; its id is then free for another call.

        Raises:
            RequestRejectedError: it can never run here.
            EngineClosedError: the loop stopped first, or the engine failed; the engine's own error is the cause.
        """
        while request.request_id in self._abandoned:  # that end is not this call's
            await asyncio.wait({self._abandoned[request.request_id]})
        self._check_running(f"request {request.request_id}")
        if request.request_id in self._futures:
            raise ValueError(f"request id {request.request_id!r} is already in flight; ids must be unique")
        self.engine.add(request)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[request.request_id] = future
        self._arrived.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(request.request_id, None) is not None:
                self.engine.abort(request.request_id)
                self._abandoned[request.request_id] = asyncio.get_running_loop().create_future()
                self._arrived.set()
            raise

    async def between_steps(self, action: Callable[[], ResultT]) -> ResultT:
        """Call `action` when the device holds no work of this engine, say to commit weights. Its error is the caller's alone.

        Raises:
            EngineClosedError: the loop stopped first.
        """

        async def act(_: asyncio.Future[ResultT]) -> ResultT:
            return action()

        return await self._between_steps(act)

    async def between_steps_in_slices(self, slices: Callable[[], Iterator[None]]) -> None:
        """`between_steps` for work in pieces, say a large commit: between two pieces other tasks run, those of other engines too.

        This engine takes no step until the iterator is exhausted; it is closed if the call is cancelled or the loop stopped first.
        """

        async def act(asked: asyncio.Future[None]) -> None:
            with contextlib.closing(slices()) as pieces:  # type: ignore[type-var]
                for _ in pieces:
                    for _ in range(QUIET_PASSES + 2):  # another loop settles first and then takes its step
                        await asyncio.sleep(0)
                    if asked.done():
                        return

        await self._between_steps(act)

    async def _between_steps(self, action: Callable[[asyncio.Future[ResultT]], Awaitable[ResultT]]) -> ResultT:
        self._check_running("between_steps")
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()

        async def act() -> None:
            try:
                result = await action(future)
            except Exception as error:
                if not future.done():  # else the caller was cancelled meanwhile
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self._actions.append((act, future))
        self._arrived.set()
        return await future

    def _check_running(self, what: str) -> None:
        if self._task is None or self._task.done():
            raise EngineClosedError(f"{what}: the engine loop is not running")

    async def _run(self) -> None:
        try:
            while True:
                await self._settle()
                if self._actions:
                    await self._act()
                    continue
                plan = self.engine.plan(self._limits)
                if plan is None:
                    if self._futures:
                        raise ValueError(
                            f"no step of at most max_step_tokens={self._limits.max_tokens} can hold any of the "
                            f"{len(self._futures)} requests that wait, the engine plans nothing ({self.engine.load()}); raise "
                            "sampler.max_step_tokens to the longest prompt at least"
                        )
                    self._arrived.clear()
                    await self._arrived.wait()
                    continue
                self.engine.submit(plan)
                self.counters.prefill_tokens += plan.prefill_tokens
                self._deliver(self.engine.collect())
        except Exception as error:
            closed = EngineClosedError(f"the engine failed: {error}")
            closed.__cause__ = error
            self._fail_all(closed)

    async def _settle(self) -> None:
        """Let callers run until a pass over the event loop brings no new request: what they submit then shares the next step."""
        num_quiet = 0
        while num_quiet < QUIET_PASSES:
            before = len(self._futures)
            self._arrived.clear()
            await asyncio.sleep(0)
            num_quiet = num_quiet + 1 if len(self._futures) == before and not self._arrived.is_set() else 0

    async def _act(self) -> None:
        result = self.engine.drain()
        if result is not None:
            self._deliver(result)
        while self._actions:  # one that the loop's end interrupts stays in the list and fails with it
            act, future = self._actions[0]
            if not future.done():  # else the caller was cancelled meanwhile
                await act()
            self._actions.pop(0)

    def _deliver(self, result: StepResult) -> None:
        self.counters.num_steps += 1
        self.counters.sampled_tokens += len(result.tokens)
        self.counters.device_s += result.device_s
        if self.on_step is not None:
            self.on_step(result)
        for completion in result.completions:
            abandoned = self._abandoned.pop(completion.request_id, None)
            if abandoned is not None:
                abandoned.set_result(None)
                continue
            future = self._futures.pop(completion.request_id, None)
            if future is not None and not future.done():
                future.set_result(completion)

    def _fail_all(self, error: EngineClosedError) -> None:
        futures = [*self._futures.values(), *(future for _, future in self._actions)]
        abandoned = list(self._abandoned.values())
        self._futures, self._actions, self._abandoned = {}, [], {}
        for ended in abandoned:
            ended.set_result(None)
        for future in futures:
            if not future.done():
                future.set_exception(error)


QUIET_PASSES = 8
"""A caller's turn of work (environment step under a time limit, next request) takes up to this many passes of the event loop."""
