"""Replica: what a trainer or a router sees of one place where completions are made. LocalReplica: one in this process.

A replica generates, follows the learner's weight versions, reports its load, and can be drained. Weights arrive in two moves:
`stage` fetches, decodes and verifies a version beside the live weights while generation goes on, `commit` puts it in their place
between two steps. What is in flight then goes on under the new version, with its cache treated as the engine's policy for stale
state says; every token carries the version it was sampled under. A replica serves nothing before its first commit, and after a
failed stage or commit it serves the version it had.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from common.errors import ReplicaUnavailableError
from common.serving.engine import EngineLoad, StepEngine, StepResult
from common.serving.loop import EngineLoop, LoopCounters
from common.transfer.staging import StagedUpdate
from common.transfer.subscriber import Subscriber
from common.types import Completion, Request

WeightsT = TypeVar("WeightsT")
ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """A replica at one moment. `weight_version` is None before the first commit."""

    replica_id: str
    weight_version: int | None
    draining: bool
    engine: EngineLoad


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageReport:
    """What staging a version took; 0 bytes and seconds if it was held already."""

    version: int
    wire_bytes: int
    staged_elements: int
    seconds: dict[str, float]


class Replica(Protocol):
    """See the module. All methods may be called while others are under way."""

    @property
    def replica_id(self) -> str: ...

    async def generate(self, request: Request) -> Completion:
        """Run one request to its one Completion; cancelling the call aborts it.

        Raises:
            RequestRejectedError: it can never run here.
            ReplicaUnavailableError: no weights yet, or draining. It was not queued.
            EngineClosedError: the engine stopped first.
        """
        ...

    async def stage(self, version: int | None = None) -> StageReport:
        """Make a version (default: the newest) ready to commit. Repeating it costs nothing. Serving goes on.

        Raises:
            TransferError: weights and version are as before; another call starts afresh.
        """
        ...

    async def commit(self) -> int:
        """Serve the staged version from the next step on and return it; without one, return the version served.

        Raises:
            WrongBaseError: the live weights are not what was staged for; stage again.
            ReplicaUnavailableError: nothing was ever staged.
        """
        ...

    def load(self) -> ReplicaLoad:
        """Never blocks."""
        ...

    async def drain(self) -> None:
        """Take no new requests and wait until those in flight have ended. Idempotent."""
        ...

    async def resume(self) -> None:
        """Take requests again after `drain`."""
        ...


class LocalReplica(Generic[WeightsT]):
    """A Replica around an engine and a subscriber whose target is that engine. Use as `async with`; leaving it closes neither."""

    def __init__(
        self,
        replica_id: str,
        engine: StepEngine[WeightsT],
        subscriber: Subscriber,
        *,
        max_step_tokens: int,
        tokens_per_sequence: int = 1,
        drive: Callable[..., EngineLoop[WeightsT]] = EngineLoop,
    ) -> None:
        """
        Args:
            drive: makes the loop that drives the engine, from the arguments of EngineLoop.
        """
        self._id = replica_id
        self._engine = engine
        self._subscriber = subscriber
        self._upstream = subscriber
        self._loop = drive(engine, max_step_tokens=max_step_tokens, tokens_per_sequence=tokens_per_sequence)
        self._staged: StagedUpdate | None = None
        self._staging = asyncio.Lock()
        self._draining = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def replica_id(self) -> str:
        return self._id

    @property
    def engine(self) -> StepEngine[WeightsT]:
        """For what is asked of it before it serves, or never changes."""
        return self._engine

    @property
    def counters(self) -> LoopCounters:
        """Sums since the replica was made."""
        return self._loop.counters

    @property
    def counters_by_replica(self) -> dict[str, LoopCounters]:
        return {self._id: self._loop.counters}

    async def update_counters(self) -> None:
        """`counters` are always up to date here."""

    async def __aenter__(self) -> LocalReplica[WeightsT]:
        await self._loop.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._loop.__aexit__(*exc)

    def watch_steps(self, on_step: Callable[[StepResult], None]) -> None:
        """Call `on_step` with every step's result, before its requests' callers go on: for callers that stream."""
        self._loop.on_step = on_step

    async def follow(self, subscriber: Subscriber) -> Subscriber:
        """Take weights from another store from the next `stage` on; returns whom that replaces.

        What is served stays until a version from there is committed.
        """
        async with self._staging:
            before, self._upstream, self._staged = self._upstream, subscriber, None
            return before

    async def while_nothing_is_committed(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work`, which reads live weights, returns. It runs in a thread of its own; stage and commit wait for it."""
        async with self._staging:
            return await asyncio.to_thread(work)

    async def generate(self, request: Request) -> Completion:
        if self._subscriber.version is None:
            raise ReplicaUnavailableError(f"replica {self._id} has no weights yet; stage and commit a version first")
        if self._draining:
            raise ReplicaUnavailableError(f"replica {self._id} is draining and takes no new request; send it elsewhere")
        self._in_flight += 1
        self._idle.clear()
        try:
            return await self._loop.generate(request)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def stage(self, version: int | None = None) -> StageReport:
        async with self._staging:
            staged = await asyncio.to_thread(self._upstream.stage, version)
            if staged is None:
                assert self._upstream.version is not None
                return StageReport(version=self._upstream.version, wire_bytes=0, staged_elements=0, seconds={})
            self._staged = staged
            return StageReport(
                version=staged.version,
                wire_bytes=staged.wire_bytes,
                staged_elements=staged.staged_elements,
                seconds=dict(staged.seconds),
            )

    async def commit(self) -> int:
        async with self._staging:
            staged, self._staged = self._staged, None
            if staged is not None:
                upstream = self._upstream
                await self._loop.between_steps_in_slices(lambda: upstream.commit_in_slices(staged))
                self._subscriber = upstream
                await asyncio.to_thread(upstream.confirm)
            if self._subscriber.version is None:
                raise ReplicaUnavailableError(f"replica {self._id} has nothing to commit; stage a version first")
            return self._subscriber.version

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(
            replica_id=self._id,
            weight_version=self._subscriber.version,
            draining=self._draining,
            engine=self._engine.load(),
        )

    async def drain(self) -> None:
        self._draining = True
        await self._idle.wait()

    async def resume(self) -> None:
        self._draining = False
