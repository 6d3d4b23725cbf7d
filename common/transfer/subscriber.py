"""Subscriber: a replica's end. Finds the cheapest way to the newest version, stages it beside the live weights, commits it.

Staging reads live weights but never writes them; the target writes them in `commit`, between two steps. Both can be repeated.
Whatever goes wrong while staging leaves weights and version as they were, and the next call starts afresh; if it casts doubt on
the weights held (a fingerprint that does not fit), it starts from an anchor.

What it refuses: an update for another base, tensors that have no counterpart, anything that does not add up. It holds, besides the
staged values, at most three buckets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from common.transfer.errors import (
    FarSideError,
    FingerprintMismatchError,
    LayoutMismatchError,
    MalformedUpdateError,
    TransferError,
    TransferTimeoutError,
    VersionGoneError,
    WrongBaseError,
)
from common.transfer.fetch import BucketFetcher, leases
from common.transfer.holding import Holding, match_names
from common.transfer.layout_wire import parse_layout
from common.transfer.live import live_fingerprints
from common.transfer.manifest import (
    LAYOUT_NAME,
    MANIFEST_NAME,
    MAX_LAYOUT_BYTES,
    MAX_MANIFEST_BYTES,
    UpdateHead,
    UpdateKey,
    parse_manifest,
)
from common.transfer.paths import Held, bytes_of_open, newest_path, still_moving
from common.transfer.paths import Path as UpdatePath
from common.transfer.receive import Receiver
from common.transfer.staging import StagedUpdate, WholeRuns
from common.transfer.store.protocol import Catalog, CatalogEntry, Store, UpdateState
from common.transfer.target import SlicedTarget, WeightTarget

log = logging.getLogger(__name__)

FRESH_S = 0.05
"""Age up to which a catalogue counts as the newest."""
MAX_PLANS = 3
"""Times that staging looks for another way after an update was pruned before it could be leased."""


class Subscriber:
    """See the module. `stage` may run in a thread of its own while the replica serves; calls must not overlap."""

    def __init__(
        self,
        store: Store,
        target: WeightTarget,
        *,
        receiver_id: str,
        key: bytes | None = None,
        timeout_s: float = 60.0,
        skip_sources: Collection[str] = (),
        expected_missing: Collection[str] = (),
        spool_dir: Path | None = None,
        num_connections: int = 2,
    ) -> None:
        """
        Args:
            receiver_id: names this replica's leases and confirmations.
            key: the publisher's; manifests must then be signed with it.
            timeout_s: how long nothing may arrive before staging gives up.
            skip_sources: published tensors that this replica does not have, on purpose.
            expected_missing: parameters of this replica that nobody publishes, on purpose.
            spool_dir: where values of whole tensors wait for their commit; None: in memory.
        """
        self._store, self._target, self._id, self._key = store, target, receiver_id, key
        self._timeout_s, self._spool_dir = timeout_s, spool_dir
        self._skip_sources, self._expected_missing = frozenset(skip_sources), frozenset(expected_missing)
        self._fetcher = BucketFetcher(store, num_connections=num_connections, timeout_s=timeout_s, name=receiver_id)
        self._held: Held | None = None
        self._in_doubt = False
        self._fingerprints: dict[int, int] = {}
        self._holding: Holding | None = None
        self._staged: StagedUpdate | None = None
        self._stalled: dict[UpdateKey, int] = {}
        self._unconfirmed: int | None = None
        self._seen: tuple[Catalog, float] | None = None
        self._num_stages = 0

    @property
    def version(self) -> int | None:
        """The version committed last; None before the first."""
        return None if self._held is None else self._held.version

    @property
    def held(self) -> Held | None:
        """The version committed last and the publisher life it is of: another life may use the same numbers."""
        return self._held

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """The newest version that can be staged, as soon as there is one; None if there is none within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        self.confirm()
        catalog = self._store.catalog()
        while True:
            path = self._path(catalog.entries, None)
            if path is not None and path.updates:
                self._seen = (catalog, time.monotonic())
                return path.updates[-1].head.version
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            catalog = self._store.catalog(after=catalog.tag, timeout_s=left_s)

    def stage(self, version: int | None = None) -> StagedUpdate | None:
        """Fetch, decode and verify the newest version (or `version`). None if nothing newer is there. Again costs nothing.

        Raises:
            TransferError: see errors.py. Weights and version are as before, and another call starts afresh.
        """
        self.confirm()
        for attempt in range(1, MAX_PLANS + 1):
            path = self._path(self._fresh_catalog().entries, version)
            if path is None:
                wanted = "any version" if version is None else f"version {version}"
                raise VersionGoneError(f"no update leads from {self._held} to {wanted}; wait for the next anchor")
            if not path.updates:
                return None
            goal = path.updates[-1].head
            if self._staged is not None and (self._staged.lineage, self._staged.version) == (goal.lineage, goal.version):
                return self._staged
            self._staged = None
            try:
                self._staged = self._stage(path.updates)
                return self._staged
            except VersionGoneError as e:
                if attempt == MAX_PLANS:
                    raise
                log.warning("looking for another way to version %d: %s", goal.version, e)
        raise AssertionError("unreachable")

    def adopt(self) -> int | None:
        """Take the newest anchor's version as committed if the live weights already are that anchor, fetching indexes only.

        For replicas that start from the checkpoint the learner started from. Reads and fingerprints all weights; None if they
        differ, if no anchor is there, or if a run is held only in part, so that it cannot be compared.
        """
        anchors = [e.head for e in self._store.catalog().entries if e.state is UpdateState.SEALED and e.head.base_version is None]
        if not anchors:
            return None
        head = anchors[-1]
        with leases(self._store, [head.key], self._id):
            holding = self._holding_of(head)
            payload = self._store.read(head.key, MANIFEST_NAME, length=MAX_MANIFEST_BYTES, timeout_s=self._timeout_s)
            manifest = parse_manifest(payload, self._key)
            if manifest.head != head:
                return None
            theirs = self._fetcher.fingerprints(manifest, holding)
        live = live_fingerprints(holding, self._target)
        if any(run not in live or live[run] != theirs.get(run) for run in holding.runs):
            return None
        self._held, self._in_doubt = Held(head.lineage, head.version), False
        self._fingerprints, self._staged = live, None
        self._unconfirmed = head.version
        self.confirm()
        return head.version

    def commit(self, staged: StagedUpdate) -> None:
        """Write a staged update into the live weights; call it between two steps. Committing the version held changes nothing.

        Raises:
            WrongBaseError: the live weights are not what the update was staged for. Nothing was written.
        """
        for _ in self.commit_in_slices(staged):
            pass
        self.confirm()

    def commit_in_slices(self, staged: StagedUpdate) -> Iterator[None]:
        """`commit`, yielding between the pieces that the target writes it in: between two, other engines may use the device.

        Takes effect when the iterator is exhausted; closed before that, it leaves weights and version as they were. It asks nothing
        of the store, so that none can hold up serving: call `confirm` afterwards.
        """
        held = Held(staged.lineage, staged.version)
        if self._held == held and not self._in_doubt:
            return
        self.check_base(staged)
        if isinstance(self._target, SlicedTarget):
            yield from self._target.apply_in_slices(staged)
        else:
            self._target.apply(staged)
        self._held, self._in_doubt = held, False
        if staged.base_version is None:
            self._fingerprints = {}
        self._fingerprints.update(staged.fingerprints)
        self._staged = None
        self._unconfirmed = staged.version

    def check_base(self, staged: StagedUpdate) -> None:
        """Raises WrongBaseError if an update was staged for other weights than those held now."""
        if staged.base_version is not None and (self._in_doubt or self._held != Held(staged.lineage, staged.base_version)):
            raise WrongBaseError(
                f"version {staged.version} was staged over {staged.base_version}, not over {self._held}; stage again"
            )

    def close(self) -> None:
        """Stop the threads. The weights stay as they are."""
        self._fetcher.close()

    def _path(self, entries: tuple[CatalogEntry, ...], version: int | None) -> UpdatePath | None:
        """The way from what is held (nothing, if that is in doubt), avoiding updates that stalled and have not moved since."""
        return newest_path(still_moving(entries, self._stalled), None if self._in_doubt else self._held, version=version)

    def _fresh_catalog(self) -> Catalog:
        """What a poll saw just now, once, or else the catalogue: a stage that follows its poll saves a round trip."""
        seen, self._seen = self._seen, None
        return seen[0] if seen is not None and time.monotonic() - seen[1] < FRESH_S else self._store.catalog()

    def _stage(self, updates: tuple[CatalogEntry, ...]) -> StagedUpdate:
        heads = [entry.head for entry in updates]
        try:
            # Leases end in the background; another name for each attempt keeps one's end from being the next one's.
            self._num_stages += 1
            with leases(self._store, [head.key for head in heads], f"{self._id}.{self._num_stages}"):
                holding = self._holding_of(heads[0])
                receiver = Receiver(
                    store=self._store,
                    fetcher=self._fetcher,
                    target=self._target,
                    holding=holding,
                    held={} if heads[0].base_version is None else self._fingerprints,
                    staged=StagedUpdate(holding.layout, heads[-1].lineage, heads[0].base_version, heads[-1].version),
                    whole_runs=WholeRuns(self._spool_dir),
                    key=self._key,
                    timeout_s=self._timeout_s,
                )
                return receiver.receive(heads)
        except (FingerprintMismatchError, WrongBaseError):
            self._in_doubt = True
            raise
        except (TransferTimeoutError, FarSideError):
            self._stalled = bytes_of_open(self._store.catalog().entries)
            raise

    def _holding_of(self, head: UpdateHead) -> Holding:
        """What we hold of an update's layout, matched with our own parameters when the layout is new."""
        if self._holding is not None and self._holding.layout.digest == head.layout_digest:
            if self._holding.still_fits(self._target):
                return self._holding
            self._holding, self._in_doubt = None, True
            raise LayoutMismatchError(f"{head.key.path}: other boxes are owned here than before; stage again, from an anchor")
        if head.base_version is not None:
            raise LayoutMismatchError(f"{head.key.path} has a layout that no anchor announced here")
        layout = parse_layout(bytes(self._store.read(head.key, LAYOUT_NAME, length=MAX_LAYOUT_BYTES, timeout_s=self._timeout_s)))
        if layout.digest != head.layout_digest:
            raise MalformedUpdateError(f"{head.key.path}: the layout object has digest {layout.digest}, not {head.layout_digest}")
        names = match_names(layout, self._target.specs(), self._skip_sources, self._expected_missing)
        self._holding = Holding(layout, names, self._target)
        return self._holding

    def confirm(self) -> None:
        """Tell the publisher what was committed last, if it does not know. If it cannot be reached, the next poll, stage or confirm
        tries again; until then it keeps our old base alive."""
        version = self._unconfirmed
        if version is None:
            return
        try:
            self._store.confirm(self._id, version)
            self._unconfirmed = None
        except (TransferError, OSError) as e:  # OSError: a store in a folder
            log.warning("version %d is committed, but the store does not know yet: %s", version, e)
