"""RankSubscriber: what a replica drives instead of a Subscriber where every worker fetches its own part of each version.

It decides which version, the ranks stage it each for itself, and a commit happens on all of them between the same two steps or on
none. Nothing passes through this process but a few numbers. Refuses a model of which some element is on no rank. Invariant: all
ranks hold the version that `version` says.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from common.errors import RoseError
from common.transfer import errors
from common.transfer.boxes import Box
from common.transfer.errors import FarSideError, TransferError, TransferTimeoutError, VersionGoneError
from common.transfer.holding import check_coverage
from common.transfer.manifest import UpdateHead, UpdateKey
from common.transfer.paths import Held, bytes_of_open, newest_path, still_moving
from rose_gpu.vllm.store_address import StoreAddress
from rose_gpu.vllm.worker_weights import RankUpdate

FIRST_POLL_S, LAST_POLL_S = 0.005, 0.1
"""Asking the ranks how far they are costs each of them a moment between two steps."""


class RankError(RoseError):
    """A rank failed in a way that is no fault of the transfer; weights and version are as before."""


class Ranks(Protocol):
    """What both forms of the engine offer for their ranks."""

    def call_ranks(self, method: str, *args: Any) -> list[Any]:
        """The answers of a method of RoseWorkerExtension on every worker, in order; arguments and answers as JSON has them."""
        ...


class RankedEngine(Protocol):
    """An engine whose workers can fetch for themselves."""

    @property
    def weights(self) -> Ranks: ...

    def commit_in_slices(self, weights: RankUpdate, *, version: int) -> Iterator[None]: ...


class RankSubscriber:
    """See the module. The methods are those of common.transfer.subscriber.Subscriber that a replica calls."""

    def __init__(self, engine: RankedEngine, address: StoreAddress, *, receiver_id: str) -> None:
        self._engine, self._ranks = engine, engine.weights
        self._store = address.open()
        self._held: Held | None = None
        self._staged: RankUpdate | None = None
        self._stalled: dict[UpdateKey, int] = {}
        by_rank = self._ranks.call_ranks("weight_boxes")
        specs = {name: (tuple(shape), dtype) for held in by_rank for name, (shape, dtype, _) in held.items()}
        owned = [
            {name: [Box(tuple(start), tuple(extent)) for start, extent in boxes] for name, (_, _, boxes) in held.items()}
            for held in by_rank
        ]
        check_coverage(specs, owned)
        self._check(self._ranks.call_ranks("open_receiver", dataclasses.asdict(address), receiver_id, sorted(specs)))

    @property
    def version(self) -> int | None:
        return None if self._held is None else self._held.version

    def stage(self, version: int | None = None) -> RankUpdate | None:
        """Have every rank stage the newest version (or `version`). None if nothing newer is there. Again costs little.

        Raises:
            TransferError: of the first rank that failed. Weights and version are as before, and another call starts afresh.
        """
        entries = still_moving(self._store.catalog().entries, self._stalled)
        path = newest_path(entries, self._held, version=version)
        if path is None:
            raise VersionGoneError(f"no update leads from {self._held} to {version or 'any version'}; wait for the next anchor")
        if not path.updates:
            return None
        goal = path.updates[-1].head
        if self._staged is not None and (self._staged.lineage, self._staged.version) == (goal.lineage, goal.version):
            return self._staged
        self._staged = None
        try:
            states = self._stage_on_all(goal)
        except (TransferTimeoutError, FarSideError):
            self._stalled = bytes_of_open(self._store.catalog().entries)
            raise
        seconds: dict[str, float] = {}
        for state in states:
            seconds = {name: max(value, seconds.get(name, 0.0)) for name, value in {**seconds, **state["seconds"]}.items()}
        self._staged = RankUpdate(
            lineage=goal.lineage,
            version=goal.version,
            wire_bytes=sum(state["wire_bytes"] for state in states),
            staged_elements=sum(state["staged_elements"] for state in states),
            seconds=seconds,
        )
        return self._staged

    def commit_in_slices(self, staged: RankUpdate) -> Iterator[None]:
        """See Subscriber.commit_in_slices."""
        held = Held(staged.lineage, staged.version)
        if self._held != held:
            yield from self._engine.commit_in_slices(staged, version=staged.version)
            self._held, self._staged = held, None

    def commit(self, staged: RankUpdate) -> None:
        """See Subscriber.commit."""
        for _ in self.commit_in_slices(staged):
            pass

    def confirm(self) -> None:
        """Ranks confirm for themselves."""

    def close(self) -> None:
        """The ranks end with their engine."""

    def _stage_on_all(self, goal: UpdateHead) -> list[Mapping[str, Any]]:
        """What each rank says of having staged `goal`. Ranks look at the catalogue for themselves, and a publisher that has started
        anew may use the same numbers: then they have staged something else."""
        self._check(self._ranks.call_ranks("start_staging", goal.version))
        states = self._wait()
        for rank, state in enumerate(states):
            found = Held(state["lineage"], state["version"])
            if found != Held(goal.lineage, goal.version):
                raise VersionGoneError(
                    f"rank {rank} has staged {found}, not {goal.key.path} of lineage {goal.lineage}; stage again"
                )
        return states

    def _wait(self) -> list[Mapping[str, Any]]:
        pause_s = FIRST_POLL_S
        while True:
            states = self._ranks.call_ranks("staging_state")
            if not any(state["running"] for state in states):
                self._check([state.get("error") for state in states])
                return states
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, LAST_POLL_S)

    @staticmethod
    def _check(failures: list[Any]) -> None:
        for rank, failure in enumerate(failures):
            if failure is not None:
                name, text = failure if isinstance(failure, list | tuple) else ("", failure)
                kind = getattr(errors, name, None)
                if not (isinstance(kind, type) and issubclass(kind, TransferError)):
                    kind = RankError
                raise kind(f"rank {rank}: {text}")
