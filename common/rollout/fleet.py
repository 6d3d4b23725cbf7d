"""ReplicaFleet: several replica processes used as one replica. It routes turns, brings versions to all, and replaces what dies.

Each replica has a keeper, a task that starts it, brings it to the version that the fleet serves, watches it, and starts it again
when it is gone, after a pause that doubles, at most `max_restarts` times without a version in between. All of that is said aloud,
with the replica's own last lines. A turn that a replica's end cuts off is played again on another under the same sampling key: its
caller sees one completion. When no replica is left, whatever waits fails with the reason of each; nothing waits in silence.

Invariant: a turn is only sent to a replica whose live weights are the fleet's version. Keepers act while the event loop runs.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import xxhash

from common.errors import EngineClosedError, ReplicaUnavailableError, RoseError
from common.rollout.routing import SlotUse, least_loaded
from common.serving.engine import EngineLoad
from common.serving.front.remote_errors import FarProcessError
from common.serving.loop import LoopCounters
from common.serving.remote import RemoteReplica
from common.serving.remote_process import Origin, ReplicaFailedError
from common.serving.replica import ReplicaLoad, StageReport
from common.transfer.errors import AuthenticationError, FingerprintMismatchError, TransferError
from common.types import Completion, Request

log = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
WATCH_S = 2.0
"""Between two looks at a replica's status."""
MAX_CATCH_UPS = 3
"""Failed attempts to bring one life of a replica to a version, before it is started again."""
LOST = (EngineClosedError, ReplicaUnavailableError, FarProcessError, AuthenticationError)
"""What a call raises when its replica is of no use, while its request may well run elsewhere."""


@dataclasses.dataclass(eq=False)
class _Member:
    """One replica of the fleet over all its lives. `version`: what the life that is up serves by our doing."""

    origin: Origin
    replica: RemoteReplica | None = None
    version: int | None = None
    num_in_flight: int = 0
    was_up: bool = False
    num_failures: int = 0
    """Lives that ended since it last took a version together with the others."""
    given_up: str | None = None
    lost: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    why_lost: str = ""
    syncing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Of the life that is up: a catch-up that mixed with a new version would put the older weights back."""
    past: LoopCounters = dataclasses.field(default_factory=LoopCounters)
    """Counters of lives that are over."""

    @property
    def name(self) -> str:
        return self.origin.replica_id

    def lose(self, replica: RemoteReplica, why: str) -> None:
        """Use this life no longer; its keeper hears of it. The first reason counts."""
        if self.replica is replica and not self.lost.is_set():
            self.why_lost = why
            self.lost.set()

    def counters(self) -> LoopCounters:
        return self.past if self.replica is None else _sum([self.past, self.replica.counters])


class ReplicaFleet:
    """See the module. A Replica, entered with `async with`: entering waits until every replica is up, leaving stops them.

    Args:
        on_news: told what happens to replicas, in whole sentences.
    """

    replica_id = "fleet"

    def __init__(self, origins: Sequence[Origin], *, max_restarts: int = 5, on_news: Callable[[str], object] = log.warning) -> None:
        assert origins, "a fleet needs a replica"
        self._members = [_Member(origin) for origin in origins]
        self._max_restarts, self._on_news = max_restarts, on_news
        self._version: int | None = None
        self._staged: int | None = None
        self._holders: set[RemoteReplica] = set()
        """Lives on which it was staged: a process that was started since has nothing to commit."""
        self._expected: dict[str, str] | None = None
        self._committing = False
        self._draining = False
        self._num_calls = 0
        """Turns that were taken and have not ended, wherever they are; a drain waits for them."""
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._changed = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._bug: BaseException | None = None

    async def __aenter__(self) -> ReplicaFleet:
        """Raises ReplicaFailedError if one does not come up at first; the others are stopped again."""
        self._event_loop = asyncio.get_running_loop()
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self._members]
        for keeper in self._keepers:
            keeper.add_done_callback(self._keeper_ended)
        try:
            while not all(member.was_up for member in self._members):
                if reasons := [member.given_up for member in self._members if member.given_up is not None]:
                    raise ReplicaFailedError(reasons[0])
                self._check_hope()
                await self._changed.wait()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(member.origin.stop() for member in self._members))

    @property
    def counters(self) -> LoopCounters:
        return _sum(list(self.counters_by_replica.values()))

    @property
    def counters_by_replica(self) -> dict[str, LoopCounters]:
        """What each replica did for this fleet, all its lives together."""
        return {member.name: member.counters() for member in self._members}

    async def update_counters(self) -> None:
        """Ask every replica; one that does not answer is its keeper's affair."""
        await asyncio.gather(*(replica.refresh() for _, replica in self._those_up()), return_exceptions=True)

    async def generate(self, request: Request) -> Completion:
        """Run a request on the least loaded replica, and again elsewhere while that replica is lost under it.

        Raises:
            RequestRejectedError: it can never run here.
            ReplicaUnavailableError: draining, or nothing was committed yet.
            ReplicaFailedError: no replica is left.
        """
        if self._draining:
            raise ReplicaUnavailableError("the fleet is draining and takes no new request")
        if self._version is None:
            raise ReplicaUnavailableError("the fleet has no weights yet; stage and commit a version first")
        self._num_calls += 1
        try:
            return await self._play(request)
        finally:
            self._num_calls -= 1
            if self._draining:
                self._tell()

    async def _play(self, request: Request) -> Completion:
        while True:
            member, replica = await self._take_slot()
            try:
                return await replica.generate(request)
            except LOST as error:
                member.lose(replica, str(error))
            finally:
                member.num_in_flight -= 1
                self._wake(1)

    async def stage(self, version: int | None = None) -> StageReport:
        """Stage on every replica that is up; one on which it fails is left to its keeper.

        Raises:
            TransferError: it failed on all of them.
        """
        if version is None:
            version = (await self._on_each(lambda replica: replica.stage(None)))[0][1].version
        holders = set[RemoteReplica]()

        async def stage(replica: RemoteReplica) -> StageReport:
            report = await replica.stage(version)
            holders.add(replica)
            return report

        reports = [report for _, report in await self._on_each(stage)]
        self._staged, self._holders = version, holders
        slowest = max(reports, key=lambda report: sum(report.seconds.values()))
        return dataclasses.replace(
            slowest,
            wire_bytes=sum(report.wire_bytes for report in reports),
            staged_elements=sum(report.staged_elements for report in reports),
        )

    async def commit(self) -> int:
        """Commit on every replica that is up; the fleet serves that version from then on, and others once they have caught up."""
        if self._staged is None:
            raise ReplicaUnavailableError("the fleet has nothing to commit; stage a version first")
        staged, holders = self._staged, self._holders

        async def commit(replica: RemoteReplica) -> int:
            if replica not in holders:  # a life that began since
                await replica.stage(staged)
            return await replica.commit()

        self._committing = True
        try:
            committed = await self._on_each(commit)
            self._version, self._expected = staged, None
            for member, version in committed:
                member.version, member.num_failures = version, 0
        finally:
            self._committing = False
            self._tell()
        return staged

    def differing_tensors(self, published: Mapping[str, np.ndarray]) -> list[str]:
        """REPLICA/TENSOR of live tensors whose bits are not those published. Who catches up later is held to them too.

        To be called while the event loop does not run: it is run for as long as this takes.
        """
        self._expected = {name: xxhash.xxh3_128_hexdigest(tensor.tobytes()) for name, tensor in published.items()}
        return self._event_loop.run_until_complete(self._compare(self._expected))

    async def _compare(self, expected: Mapping[str, str]) -> list[str]:
        found = await self._on_each(lambda replica: replica.digests())
        current = [(member, live) for member, live in found if member.version == self._version]
        return [f"{member.name}/{name}" for member, live in current for name in _differing(expected, live)]

    def load(self) -> ReplicaLoad:
        loads = [member.replica.load().engine for member in self._members if member.replica is not None]
        names = ("running_requests", "waiting_requests", "used_cache_tokens", "capacity_cache_tokens", "reclaimable_cache_tokens")
        sums = {name: sum(getattr(load, name) for load in loads) for name in names}
        engine = EngineLoad(weight_version=self._version or 0, **sums)
        return ReplicaLoad(replica_id=self.replica_id, weight_version=self._version, draining=self._draining, engine=engine)

    async def drain(self) -> None:
        self._draining = True
        while self._num_calls:
            await self._changed.wait()

    async def resume(self) -> None:
        self._draining = False

    async def _take_slot(self) -> tuple[_Member, RemoteReplica]:
        """A free slot of a replica that serves the fleet's version, as soon as there is one."""
        while True:
            usable = [(m, m.replica) for m, _ in self._those_up() if m.version == self._version and m.replica is not None]
            uses = [SlotUse(num_in_flight=m.num_in_flight, num_slots=replica.info.max_slots) for m, replica in usable]
            if (idx := least_loaded(uses)) is not None:
                usable[idx][0].num_in_flight += 1
                return usable[idx]
            self._check_hope()
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(1)  # the place it was called for is another's
                raise

    def _those_up(self) -> list[tuple[_Member, RemoteReplica]]:
        return [(m, m.replica) for m in self._members if m.replica is not None and not m.lost.is_set()]

    async def _on_each(self, call: Callable[[RemoteReplica], Coroutine[Any, Any, ResultT]]) -> list[tuple[_Member, ResultT]]:
        """What `call` gives on every replica that is up, for those where it works: at least one, however long that takes to come.

        Raises:
            TransferError: it failed so on each that was not lost under it.
        """

        async def alone(member: _Member, replica: RemoteReplica) -> ResultT:
            async with member.syncing:
                return await call(replica)

        while True:
            up = self._those_up()
            results = await asyncio.gather(*(alone(member, replica) for member, replica in up), return_exceptions=True)
            good: list[tuple[_Member, ResultT]] = []
            failures: list[TransferError] = []
            for (member, replica), result in zip(up, results, strict=True):
                match result:
                    case EngineClosedError() | ReplicaUnavailableError() | FarProcessError() | AuthenticationError():
                        member.lose(replica, str(result))
                    case TransferError():
                        if await self._is_there(member, replica):
                            self._on_news(f"Replica {member.name} stays behind: {result}")
                            failures.append(result)
                    case BaseException():
                        raise result
                    case _ if member.replica is replica:  # else it has ended since
                        good.append((member, result))
            if good:
                return good
            if failures:
                raise failures[0]
            while not self._those_up():
                self._check_hope()
                await self._changed.wait()

    async def _is_there(self, member: _Member, replica: RemoteReplica) -> bool:
        """Whether a replica that failed at a transfer still answers: its end is told by no other error than its store's is."""
        try:
            await replica.refresh()
        except LOST as error:
            member.lose(replica, str(error))
        return member.replica is replica and not member.lost.is_set()

    def _tell(self) -> None:
        """The state of a replica or of the fleet changed: let everybody look again."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._wake(len(self._waiting))

    def _wake(self, num_waiting: int) -> None:
        """Let so many of those who wait for a slot look again, the longest waiting first."""
        while self._waiting and num_waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                num_waiting -= 1

    def _check_hope(self) -> None:
        """Raises ReplicaFailedError if every replica was given up."""
        if self._bug is not None:
            raise self._bug
        if all(member.given_up is not None for member in self._members):
            raise ReplicaFailedError("no replica is left: " + "; ".join(str(member.given_up) for member in self._members))

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        """A keeper that fails by our own fault must not leave others waiting for what it would have done."""
        if not keeper.cancelled() and keeper.exception() is not None:
            self._bug = keeper.exception()
            self._tell()

    async def _keep(self, member: _Member) -> None:
        """Give a replica one life after the other; returns once it is given up."""
        while True:
            why = await self._one_life(member)
            ending = await member.origin.stop()
            member.num_failures += 1
            text = f"replica {member.name}: {why}; {ending}"
            if not member.was_up or member.num_failures > self._max_restarts:
                member.given_up = text
                self._on_news(f"Given up: {text}")
                self._tell()
                return
            pause_s = min(FIRST_PAUSE_S * 2 ** (member.num_failures - 1), LONGEST_PAUSE_S)
            attempt = f"attempt {member.num_failures} of {self._max_restarts}"
            self._on_news(f"Lost {text}\nReplica {member.name} is started again in {pause_s:g} s ({attempt})")
            await asyncio.sleep(pause_s)

    async def _one_life(self, member: _Member) -> str:
        """Start a replica and look after it; returns why that is over."""
        try:
            replica = await member.origin.start()
        except (RoseError, OSError) as error:  # of the system: no such command, no room for a process or its log
            return str(error)
        member.lost.clear()
        member.syncing = asyncio.Lock()
        member.replica, member.version, member.was_up = replica, None, True
        self._tell()
        ended = asyncio.ensure_future(member.origin.ended())
        lost = asyncio.ensure_future(member.lost.wait())
        try:
            return await self._look_after(member, replica, ended, lost)
        finally:
            ended.cancel()
            lost.cancel()
            member.past = member.counters()
            member.replica = member.version = None
            self._tell()

    async def _look_after(
        self, member: _Member, replica: RemoteReplica, ended: asyncio.Future[None], lost: asyncio.Future[Any]
    ) -> str:
        num_failed, is_due = 0, False
        while True:
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                if self._is_behind(member):
                    await self._catch_up(member, replica)
                    num_failed = 0
                elif is_due:
                    await replica.refresh()
            except LOST as error:
                member.lose(replica, str(error))
            except TransferError as error:
                num_failed += 1
                if await self._is_there(member, replica) and num_failed >= MAX_CATCH_UPS:
                    return f"it cannot take version {self._version}: {error}"
            await asyncio.wait({ended, lost, changed}, timeout=WATCH_S, return_when=asyncio.FIRST_COMPLETED)
            is_due = not changed.done()
            changed.cancel()
            if ended.done():
                return "it ended by itself"
            if lost.done():
                return member.why_lost

    def _is_behind(self, member: _Member) -> bool:
        """Whether its keeper is to bring it to the fleet's version; while the fleet commits, it comes along or is so afterwards."""
        return not self._committing and self._version is not None and member.version != self._version

    async def _catch_up(self, member: _Member, replica: RemoteReplica) -> None:
        """Bring one replica to the fleet's version by itself."""
        async with member.syncing:
            if not self._is_behind(member):
                return
            await replica.stage(self._version)
            committed = await replica.commit()
            if self._expected is not None and committed == self._version:
                differing = _differing(self._expected, await replica.digests())
                if differing:
                    raise FingerprintMismatchError(f"version {committed}: {', '.join(differing)} are not what was published")
            member.version = committed
        self._on_news(f"Replica {member.name} has caught up and serves version {committed}")
        self._tell()


def _differing(expected: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    return sorted(name for name in expected.keys() | live.keys() if expected.get(name) != live.get(name))


def _sum(parts: Sequence[LoopCounters]) -> LoopCounters:
    names = [field.name for field in dataclasses.fields(LoopCounters)]
    return LoopCounters(**{name: sum(getattr(part, name) for part in parts) for name in names})
