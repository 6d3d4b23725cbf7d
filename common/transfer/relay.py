"""RelayStore: a Store in front of another one, near those who read. The link to the store behind it carries every object once.

Reads go through: the first asks upstream for the whole object (or for its index, if only that is wanted), everybody else joins that
flight, whatever range is wanted, and bytes are passed on while they come. Whole objects that add up stay in a cache; what upstream
removes leaves it. The catalogue is one standing question upstream; leases, confirmations and writes pass through, so the publisher
pins versions for, and learns from, the real receivers. While upstream cannot be reached, what is cached is served and everything
else fails with an error that says so.

A relay is trusted with nothing: receivers check what it passes on against the learner's manifest. What it keeps it holds against
the manifest too, with the publisher's key if it has that. An object that does not add up is fetched once more, then passed on as
it is and not kept. Readers in this process wait until an object is whole and checked; HTTP servers pass bytes on before.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import itertools
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from common.transfer.cache import DAMAGED, ObjectCache
from common.transfer.errors import (
    FarSideError,
    MalformedUpdateError,
    OutcomeUnknownError,
    TransferError,
    TransferTimeoutError,
    UnreachableError,
)
from common.transfer.flight import Flight
from common.transfer.manifest import MANIFEST_NAME, UpdateHead, UpdateKey
from common.transfer.store.protocol import (
    LEASE_TTL_S,
    Arrived,
    Catalog,
    CatalogEntry,
    Confirmation,
    Parts,
    Store,
    UpdateState,
    check_object_name,
    failed,
    gone,
)

log = logging.getLogger(__name__)

CATALOG_AGE_S = 5.0
"""The catalogue is asked for again after this, news or not: bytes of open updates are in it."""
RETRY_S = 0.5
"""Between attempts to reach upstream for the catalogue."""
SLICE_S = 2.0
"""How long a flight waits upstream before it looks whether anybody still wants it."""
STALL_S = 10.0
"""How long a reader whose bytes have begun to come waits for more."""
MAX_FETCHES = 2
"""Of an object that does not add up, before it is passed on as it is."""
FRONT_BYTES = 64 << 10
"""A read of at most so many first bytes is for an index and does not bring the whole object."""
MAX_FRONTS = 4096
NUM_FLIGHTS = 8
"""Objects fetched or waited for upstream at a time: a few receivers' read-ahead."""

T = TypeVar("T")
OnDamaged = Callable[[UpdateKey, str, str], None]


class RelayStore:
    """A Store (see the protocol and the module)."""

    def __init__(self, upstream: Store, cache: ObjectCache, *, on_damaged: OnDamaged | None = None) -> None:
        """
        Args:
            on_damaged: told of every object whose bytes turned out wrong, with the reason, before it is fetched again.
        """
        self._upstream, self._cache = upstream, cache
        self._on_damaged = on_damaged or (lambda key, name, why: None)
        self._flights: dict[tuple[UpdateHead, str, int | None], Flight] = {}
        self._fronts: dict[tuple[UpdateHead, str, int], memoryview] = {}
        self._lock = threading.Lock()
        self._judging = threading.Lock()
        self._news = threading.Condition()
        self._entries: tuple[CatalogEntry, ...] | None = None
        self._taking = threading.Lock()
        self._asks = itertools.count()
        self._newest_ask = -1
        """When the catalogue at hand was asked for, counted in asks: one that was asked for earlier may be older."""
        self._trouble: str | None = None
        self._closed = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(NUM_FLIGHTS, "relay")
        threading.Thread(target=self._watch, name="relay-catalog", daemon=True).start()

    def close(self) -> None:
        """Fetch nothing more. The cache stays."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def catalog(self, *, after: str | None = None, timeout_s: float = 0.0) -> Catalog:
        with self._news:
            self._news.wait_for(lambda: self._entries is not None)
            self._news.wait_for(lambda: _tag(self._entries or ()) != after, timeout_s)
            assert self._entries is not None
            if not self._entries and self._trouble is not None:
                raise UnreachableError(f"the relay has nothing cached and cannot reach the store behind it: {self._trouble}")
            return Catalog(tag=_tag(self._entries), entries=self._entries)

    def _watch(self) -> None:
        tag: str | None = None
        while not self._closed.is_set():
            try:
                ask = next(self._asks)
                catalog = self._upstream.catalog(after=tag, timeout_s=0.0 if tag is None else CATALOG_AGE_S)
                tag = catalog.tag if self._take(catalog, ask) else None
            except (TransferError, OSError) as e:
                tag = None
                self._miss(str(e))
                self._closed.wait(RETRY_S)

    def _take(self, catalog: Catalog, ask: int) -> bool:
        """Go by this catalogue, unless one that was asked for later is at hand: what was opened since would be forgotten."""
        with self._taking:
            if ask < self._newest_ask:
                return False
            self._newest_ask = ask
            self._go_by(catalog)
        return True

    def _go_by(self, catalog: Catalog) -> None:
        heads = {entry.head for entry in catalog.entries if entry.state is not UpdateState.FAILED}
        self._cache.retain(heads)
        with self._lock:
            self._fronts = {where: front for where, front in self._fronts.items() if where[0] in heads}
        with self._news:
            if self._trouble is not None:
                log.warning("the store behind this relay is back")
            self._entries, self._trouble = catalog.entries, None
            self._news.notify_all()
        for entry in catalog.entries:
            if entry.state is UpdateState.SEALED and self._cache.has(entry.head.key):
                self._submit(self._judge, entry.head)  # what came while it was open

    def _miss(self, why: str) -> None:
        """Upstream does not answer: go on with the catalogue as it was, at the start with what is whole in the cache."""
        with self._news:
            if self._trouble is None:
                log.warning("the store behind this relay cannot be reached; serving what is cached: %s", why)
            self._trouble = why
            if self._entries is None:
                self._entries = self._cache.entries()
            self._news.notify_all()

    def _refresh(self) -> None:
        ask = next(self._asks)
        try:
            self._take(self._upstream.catalog(), ask)
        except TransferError as e:
            log.info("the catalogue could not be had: %s", e)

    def read(
        self,
        key: UpdateKey,
        name: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        timeout_s: float,
        arrived: Arrived | None = None,
    ) -> memoryview:
        head = self._head(key)
        content = self._cache.read(head, check_object_name(name), start, length)
        if content is None:
            flight = self._join(head, name, length if start == 0 and length is not None and length <= FRONT_BYTES else None)
            try:
                content = flight.wait(start, length, timeout_s, max(timeout_s, STALL_S), arrived)
            except TransferTimeoutError as e:
                if self._trouble is None:
                    raise
                raise UnreachableError(f"{e}: the store behind the relay cannot be reached: {self._trouble}") from None
            finally:
                with self._lock:
                    flight.num_readers -= 1
        if into is not None and len(content) > len(into):
            raise MalformedUpdateError(f"{key.path}/{name} has {len(content)} bytes where at most {len(into)} are possible")
        return content

    def _head(self, key: UpdateKey) -> UpdateHead:
        """The head under which the update is known. A reader may have heard of it before we have: then ask."""
        entry = self.catalog().find(key)
        if entry is None:
            self._refresh()
            entry = self.catalog().find(key)
        if entry is None:
            raise gone(key)
        if entry.state is UpdateState.FAILED:
            raise failed(key, entry.error or "no reason given")
        return entry.head

    def _join(self, head: UpdateHead, name: str, front_bytes: int | None) -> Flight:
        """The flight of an object, or of its front unless all of it is on its way, with one reader more; a new one if need be."""
        with self._lock:
            flight = self._flights.get((head, name, None)) or self._flights.get((head, name, front_bytes))
            if flight is None:
                flight = self._flights[head, name, front_bytes] = Flight(head, name, front_bytes)
                self._submit(self._fly, flight)
            flight.num_readers += 1
            return flight

    def _submit(self, act: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile: whoever waits runs into its time limit
            self._pool.submit(act, argument)

    def _fly(self, flight: Flight) -> None:
        """Bring an object: in a thread of the pool, until it is here, will not come, or nobody wants it any more."""
        try:
            content = self._fetch(flight) if flight.front_bytes is None else self._fetch_front(flight, flight.front_bytes)
        except TransferError as e:
            self._land(flight)
            flight.fail(e)
        except Exception as e:
            log.exception("%s/%s failed", flight.head.key.path, flight.name)
            self._land(flight)
            flight.fail(FarSideError(f"the relay failed: {type(e).__name__}: {e}"))
        else:
            flight.finish(content)
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        with self._lock:
            if self._flights.get((flight.head, flight.name, flight.front_bytes)) is flight:
                del self._flights[flight.head, flight.name, flight.front_bytes]

    def _fetch(self, flight: Flight) -> memoryview:
        head, name = flight.head, flight.name
        self._judge(head)
        kept = self._cache.read(head, name, 0, None)  # by a flight that landed after our first reader looked
        if kept is not None:
            return kept
        flight.waits = True
        num_fetches = 0
        while True:
            try:
                content = self._upstream.read(head.key, name, timeout_s=SLICE_S, arrived=flight.arrived)
            except TransferTimeoutError as e:
                self._wait_for_upstream(flight, e)
                continue
            num_fetches += 1
            try:
                if name == MANIFEST_NAME:
                    self._take_manifest(head, content)
                    return content
                summary = self._cache.check(head, name, content)
            except DAMAGED as e:
                log.warning("%s/%s arrived damaged: %s", head.key.path, name, e)
                self._on_damaged(head.key, name, str(e))
                if num_fetches < MAX_FETCHES:
                    continue
                return content
            if self._is_current(head):
                self._cache.keep(head, name, content, summary)
            return content

    def _fetch_front(self, flight: Flight, num_bytes: int) -> memoryview:
        """The first bytes of an object, kept in memory: an index costs the link an index, not its bucket."""
        where = flight.head, flight.name, num_bytes
        with self._lock:
            kept = self._fronts.get(where)
        while kept is None:
            try:
                kept = self._upstream.read(flight.head.key, flight.name, length=num_bytes, timeout_s=SLICE_S)
            except TransferTimeoutError as e:
                self._wait_for_upstream(flight, e)
        with self._lock:
            self._fronts[where] = kept
            if len(self._fronts) > MAX_FRONTS:
                del self._fronts[next(iter(self._fronts))]
        self._check_fronts(flight.head)
        return kept

    def _check_fronts(self, head: UpdateHead) -> None:
        """Forget fronts that the manifest, once it is here, does not confirm."""
        with self._lock:
            mine = [(where, front) for where, front in self._fronts.items() if where[0] == head]
            for where, front in mine:
                if not self._cache.confirms_index(head, where[1], front):
                    del self._fronts[where]

    def _wait_for_upstream(self, flight: Flight, error: TransferTimeoutError) -> None:
        """Go on waiting; or raise what ends a flight: nobody waits for it, the update is gone or failed, or the relay closes."""
        if isinstance(error, UnreachableError):
            self._miss(str(error))
            self._closed.wait(RETRY_S)
        with self._lock:
            if flight.num_readers == 0 or self._closed.is_set():
                # Under the same lock as _join, so that nobody joins a flight that ends.
                del self._flights[flight.head, flight.name, flight.front_bytes]
                raise error
        if self._head(flight.head.key) != flight.head:
            raise gone(flight.head.key)

    def _judge(self, head: UpdateHead) -> None:
        """Of a sealed update, have the manifest here, so that buckets are held against it; unless a flight is bringing it."""
        if not self._is_sealed(head):
            return
        with self._judging:
            flight = self._flights.get((head, MANIFEST_NAME, None))
            if (flight is not None and flight.waits) or self._cache.read(head, MANIFEST_NAME, 0, 0) is not None:
                return
            try:
                manifest = self._upstream.read(head.key, MANIFEST_NAME, timeout_s=SLICE_S)
                self._take_manifest(head, manifest)
            except TransferError as e:
                log.info("%s: no manifest yet: %s", head.key.path, e)

    def _take_manifest(self, head: UpdateHead, manifest: memoryview) -> None:
        """Keep a manifest and forget what it does not confirm. Raises one of DAMAGED if it is none."""
        self._cache.check(head, MANIFEST_NAME, manifest)
        for name in self._cache.discard_forged(head, manifest):
            self._on_damaged(head.key, name, "the manifest does not confirm it")
        if self._is_current(head):
            self._cache.keep(head, MANIFEST_NAME, manifest, None)
            self._check_fronts(head)

    def _is_current(self, head: UpdateHead) -> bool:
        with self._news:
            return any(entry.head == head for entry in self._entries or ())

    def _is_sealed(self, head: UpdateHead) -> bool:
        with self._news:
            return any(entry.head == head and entry.state is UpdateState.SEALED for entry in self._entries or ())

    def lease(self, key: UpdateKey, holder: str, ttl_s: float = LEASE_TTL_S) -> None:
        try:
            self._upstream.lease(key, holder, ttl_s)
        except (TransferTimeoutError, OutcomeUnknownError) as e:
            if not self._cache.has(key):
                raise
            log.info("%s is leased here only: %s", key.path, e)

    def release(self, key: UpdateKey, holder: str) -> None:
        self._upstream.release(key, holder)

    def confirm(self, receiver: str, version: int) -> None:
        self._upstream.confirm(receiver, version)

    def confirmations(self) -> dict[str, Confirmation]:
        return self._upstream.confirmations()

    def open(self, head: UpdateHead) -> None:
        self._upstream.open(head)
        self._refresh()

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        self._upstream.put(key, name, parts)

    def seal(self, key: UpdateKey, manifest: bytes) -> None:
        self._upstream.seal(key, manifest)
        self._refresh()

    def fail(self, key: UpdateKey, text: str) -> None:
        self._upstream.fail(key, text)
        self._refresh()

    def remove(self, key: UpdateKey, *, force: bool = False) -> bool:
        removed = self._upstream.remove(key, force=force)
        self._refresh()
        return removed


def _tag(entries: tuple[CatalogEntry, ...]) -> str:
    """From what the catalogue says alone: a relay that starts again, or another one, has the same."""
    seen = [(entry.head.lineage, entry.head.key.path, entry.state) for entry in entries]
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
