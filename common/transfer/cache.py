"""ObjectCache: what a relay keeps of the updates that pass it: any Store under a bound, of which nothing is believed unread.

Only whole objects that add up come in: a bucket by the checksums of its own index and, once the manifest is here, by that; a layout
by its digest; a manifest by its head (and its signature, with the key). What an earlier life or another relay left in the store is
checked in the same way before its first use, and a length that changes later is noticed: a torn or truncated file costs a fetch of
that object and never reaches a reader. Room is made by dropping the updates not read for longest. Refuses nothing: what cannot be
kept (too large, no room on the disk) is simply not there the next time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Collection
from typing import Protocol

from common.transfer.errors import ChecksumError, FarSideError, MalformedUpdateError, TransferError, VersionGoneError
from common.transfer.layout_wire import parse_layout
from common.transfer.manifest import (
    LAYOUT_NAME,
    MANIFEST_NAME,
    BucketSummary,
    UpdateHead,
    UpdateKey,
    bucket_name,
    check_bucket,
    parse_manifest,
)
from common.transfer.store.protocol import CatalogEntry, Store, UpdateState

log = logging.getLogger(__name__)

DAMAGED = (ChecksumError, MalformedUpdateError)
"""What `check` raises for bytes that are not those the publisher wrote."""


@dataclasses.dataclass
class _Held:
    """An update in the cache. `summaries` and `sizes` are of the objects that were checked in this life."""

    head: UpdateHead
    num_bytes: int
    last_use: int
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    summaries: dict[str, BucketSummary] = dataclasses.field(default_factory=dict)
    expected: dict[str, BucketSummary] = dataclasses.field(default_factory=dict)


class CacheStore(Store, Protocol):
    """A store that can forget single objects."""

    def discard(self, key: UpdateKey, name: str) -> None: ...


class ObjectCache:
    """See the module. Thread-safe. `store` belongs to the cache, or to several caches of the same updates."""

    def __init__(self, store: CacheStore, *, max_bytes: int, key: bytes | None = None) -> None:
        """
        Args:
            max_bytes: kept at most of what this cache put or found there; must hold the newest path to be of any use.
            key: the publisher's, if manifests are to be believed only with its signature.
        """
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes} must be positive; give the size of an anchor or more")
        self._store, self._max_bytes, self._key = store, max_bytes, key
        self._lock = threading.Lock()
        self._uses = 0
        self._held: dict[UpdateKey, _Held] = {}
        for entry in store.catalog().entries:
            self._held[entry.head.key] = _Held(entry.head, entry.wire_bytes, self._next_use())

    def entries(self) -> tuple[CatalogEntry, ...]:
        """The updates whose manifest is here: what can be served while nothing else can be reached."""
        return tuple(entry for entry in self._store.catalog().entries if entry.state is UpdateState.SEALED)

    def has(self, key: UpdateKey) -> bool:
        with self._lock:
            return key in self._held

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(held.num_bytes for held in self._held.values())

    def read(self, head: UpdateHead, name: str, start: int, length: int | None) -> memoryview | None:
        """Bytes of an object, or None if it is not here whole."""
        with self._lock:
            held = self._held.get(head.key)
            if held is None or held.head != head:
                return None
            held.last_use = self._next_use()
            size = held.sizes.get(name)
        try:
            if size is None and not self._check_found(held, name):
                return None
            content = self._store.read(head.key, name, start=start, length=length, timeout_s=0.0)
        except (TransferError, OSError):
            return None
        with self._lock:
            size = held.sizes.get(name, 0)
        end = size if length is None else min(start + length, size)
        if len(content) != max(end - start, 0):
            self._discard(held, name, "it lost bytes")
            return None
        return content

    def _check_found(self, held: _Held, name: str) -> bool:
        """Check an object that this life did not put here, and forget it if it is damaged."""
        try:
            content = self._store.read(held.head.key, name, timeout_s=0.0)
            summary = self.check(held.head, name, content)
        except DAMAGED as e:
            self._discard(held, name, str(e))
            return False
        with self._lock:
            self._note(held, name, content, summary)
        if name == MANIFEST_NAME:
            self.discard_forged(held.head, content)
        return True

    def check(self, head: UpdateHead, name: str, content: memoryview) -> BucketSummary | None:
        """Of a bucket, its summary. Raises one of DAMAGED unless the object adds up."""
        if name == LAYOUT_NAME:
            digest = parse_layout(bytes(content)).digest
            if digest != head.layout_digest:
                raise ChecksumError(f"the layout has digest {digest}, not {head.layout_digest}")
            return None
        if name == MANIFEST_NAME:
            if parse_manifest(content, self._key).head != head:
                raise ChecksumError("the manifest is that of another update")
            return None
        summary = check_bucket(content)
        with self._lock:
            held = self._held.get(head.key)
            expected = held.expected.get(name) if held is not None and held.head == head else None
        if expected is not None and summary != expected:
            raise ChecksumError(f"the bucket is {summary}, the manifest says {expected}")
        return summary

    def discard_forged(self, head: UpdateHead, manifest: memoryview) -> list[str]:
        """Forget the buckets, each right by its own index, that the manifest does not confirm. Returns their names."""
        said = _summaries(manifest, self._key)
        with self._lock:
            held = self._held.get(head.key)
            if held is None or held.head != head:
                return []
            forged = [name for name, summary in held.summaries.items() if said.get(name) != summary]
        for name in forged:
            self._discard(held, name, "the manifest does not confirm it")
        return forged

    def confirms_index(self, head: UpdateHead, name: str, front: memoryview) -> bool:
        """Whether the first bytes of a bucket may be right: False if a manifest kept here says that its index is another."""
        with self._lock:
            held = self._held.get(head.key)
            said = held.expected.get(name) if held is not None and held.head == head else None
        if said is None or len(front) < said.index_bytes:
            return True
        return hashlib.sha256(front[: said.index_bytes]).hexdigest() == said.index_sha256

    def keep(self, head: UpdateHead, name: str, content: memoryview, summary: BucketSummary | None) -> bool:
        """Put a checked object in. False if it could not be kept."""
        self._make_room(head.key, len(content))
        if self.num_bytes + len(content) > self._max_bytes:
            log.warning("cache: %s/%s does not fit into %d bytes", head.key.path, name, self._max_bytes)
            return False
        try:
            self._put(head, name, content)
        except TransferError as e:
            log.info("cache: %s/%s cannot be kept: %s", head.key.path, name, e)
            return False
        except OSError as e:
            log.warning("cache: %s/%s cannot be kept: %s", head.key.path, name, e)
            self._make_room(head.key, self._max_bytes)
            return False
        with self._lock:
            held = self._held.setdefault(head.key, _Held(head, 0, self._next_use()))
            held.head = head
            held.num_bytes += len(content)
            self._note(held, name, content, summary)
            forged = summary is not None and bool(held.expected) and held.expected.get(name) != summary
        if forged:  # the manifest came between its check and now
            self._discard(held, name, "the manifest does not confirm it")
        return not forged

    def _put(self, head: UpdateHead, name: str, content: memoryview) -> None:
        for last in (False, True):
            try:
                self._store.open(head)
                if name == MANIFEST_NAME:
                    self._store.seal(head.key, bytes(content))
                else:
                    self._store.put(head.key, name, [content])
                return
            except (FarSideError, VersionGoneError, MalformedUpdateError):
                if last:
                    raise
                self.drop(head.key)  # the remains of another life, or what another relay is removing

    def retain(self, heads: Collection[UpdateHead]) -> None:
        """Drop every update that is not one of these."""
        wanted = set(heads)
        with self._lock:
            unwanted = [key for key, held in self._held.items() if held.head not in wanted]
        for key in unwanted:
            self.drop(key)

    def drop(self, key: UpdateKey) -> None:
        """Forget an update. Who reads it now keeps what was read."""
        with self._lock:
            self._held.pop(key, None)
        try:
            self._store.remove(key, force=True)
        except OSError as e:
            log.warning("cache: %s could not be removed: %s", key.path, e)

    def _discard(self, held: _Held, name: str, why: str) -> None:
        log.warning("cache: %s/%s is given up: %s", held.head.key.path, name, why)
        with self._lock:
            held.summaries.pop(name, None)
            held.num_bytes = max(0, held.num_bytes - held.sizes.pop(name, 0))
        try:
            self._store.discard(held.head.key, name)
        except OSError as e:
            log.warning("cache: %s/%s could not be removed: %s", held.head.key.path, name, e)

    def _make_room(self, key: UpdateKey, num_bytes: int) -> None:
        """Drop other updates, those not read for longest first, until so much fits beside what stays."""
        while True:
            with self._lock:
                others = sorted((held.last_use, other) for other, held in self._held.items() if other != key)
                used = sum(held.num_bytes for held in self._held.values())
            if not others or used + num_bytes <= self._max_bytes:
                return
            self.drop(others[0][1])

    def _note(self, held: _Held, name: str, content: memoryview, summary: BucketSummary | None) -> None:
        held.sizes[name] = len(content)
        if summary is not None:
            held.summaries[name] = summary
        elif name == MANIFEST_NAME:
            held.expected = _summaries(content, self._key)

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def _summaries(manifest: memoryview, key: bytes | None) -> dict[str, BucketSummary]:
    return {bucket_name(i): summary for i, summary in enumerate(parse_manifest(manifest, key).buckets)}
