"""MemoryStore: updates in this process's memory, for one process or behind an HTTP server."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid

from common.clock import Clock, MonotonicClock
from common.transfer.errors import FarSideError, MalformedUpdateError, TransferTimeoutError
from common.transfer.manifest import LAYOUT_NAME, MANIFEST_NAME, UpdateHead, UpdateKey
from common.transfer.store.protocol import (
    LEASE_TTL_S,
    MAX_ERROR_CHARS,
    Arrived,
    Catalog,
    CatalogEntry,
    Confirmation,
    Parts,
    UpdateState,
    check_holder,
    check_object_name,
    failed,
    gone,
)


@dataclasses.dataclass
class _Update:
    head: UpdateHead
    objects: dict[str, bytes] = dataclasses.field(default_factory=dict)
    leases: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None

    @property
    def entry(self) -> CatalogEntry:
        sealed = UpdateState.SEALED if MANIFEST_NAME in self.objects else UpdateState.OPEN
        wire_bytes = sum(len(content) for name, content in self.objects.items() if name != LAYOUT_NAME)
        return CatalogEntry(
            head=self.head, state=UpdateState.FAILED if self.error else sealed, wire_bytes=wire_bytes, error=self.error
        )


class MemoryStore:
    """A Store (see the protocol). Reads return views of the stored objects: no copy."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._updates: dict[UpdateKey, _Update] = {}
        self._confirmed: dict[str, tuple[int, float]] = {}
        self._life, self._serial = uuid.uuid4().hex[:8], 0
        self._news = threading.Condition()

    def catalog(self, *, after: str | None = None, timeout_s: float = 0.0) -> Catalog:
        with self._news:
            self._news.wait_for(lambda: self._tag != after, timeout_s)
            entries = tuple(update.entry for _, update in sorted(self._updates.items()))
            return Catalog(tag=self._tag, entries=entries)

    def open(self, head: UpdateHead) -> None:
        with self._news:
            held = self._updates.get(head.key)
            if held is not None:
                if held.head != head:
                    raise FarSideError(f"{head.key.path} exists already with another head; versions must grow")
                return
            self._updates[head.key] = _Update(head)
            self._tell()

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        check_object_name(name)
        content = b"".join(parts)
        with self._news:
            update = self._update(key)
            held = update.objects.setdefault(name, content)
            if held != content:
                raise FarSideError(f"{key.path}/{name} exists already with other content; objects never change")
            self._news.notify_all()

    def seal(self, key: UpdateKey, manifest: bytes) -> None:
        self.put(key, MANIFEST_NAME, [manifest])
        with self._news:
            self._tell()

    def fail(self, key: UpdateKey, text: str) -> None:
        with self._news:
            update = self._updates.get(key)
            if update is not None and MANIFEST_NAME not in update.objects:
                update.error = update.error or text[:MAX_ERROR_CHARS]
                self._tell()

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
        check_object_name(name)
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while name not in (update := self._update(key)).objects:
                if update.error is not None:
                    raise failed(key, update.error)
                if not self._news.wait(deadline_s - time.monotonic()):
                    raise TransferTimeoutError(f"{key.path}/{name} did not come within {timeout_s} s")
            content = memoryview(update.objects[name])
        content = content[start : None if length is None else start + length]
        if into is not None and len(content) > len(into):
            raise MalformedUpdateError(f"{key.path}/{name} has {len(content)} bytes where at most {len(into)} are possible")
        return content

    def lease(self, key: UpdateKey, holder: str, ttl_s: float = LEASE_TTL_S) -> None:
        with self._news:
            self._update(key).leases[check_holder(holder)] = self._clock.now_s() + ttl_s

    def release(self, key: UpdateKey, holder: str) -> None:
        with self._news:
            if key in self._updates:
                self._updates[key].leases.pop(holder, None)

    def confirm(self, receiver: str, version: int) -> None:
        with self._news:
            self._confirmed[check_holder(receiver)] = (version, self._clock.now_s())

    def confirmations(self) -> dict[str, Confirmation]:
        with self._news:
            now_s = self._clock.now_s()
            return {name: Confirmation(version, now_s - at_s) for name, (version, at_s) in self._confirmed.items()}

    def remove(self, key: UpdateKey, *, force: bool = False) -> bool:
        with self._news:
            update = self._updates.get(key)
            if update is None:
                return True
            now_s = self._clock.now_s()
            if not force and any(end_s > now_s for end_s in update.leases.values()):
                return False
            del self._updates[key]
            self._tell()
            return True

    def discard(self, key: UpdateKey, name: str) -> None:
        """Forget one object. For caches: a store that others read from never takes anything back but whole updates."""
        with self._news:
            if key in self._updates:
                self._updates[key].objects.pop(name, None)

    @property
    def _tag(self) -> str:
        """Of this life: a store that starts anew must not look like the one that somebody has seen."""
        return f"{self._life}-{self._serial}"

    def _update(self, key: UpdateKey) -> _Update:
        if key not in self._updates:
            raise gone(key)
        return self._updates[key]

    def _tell(self) -> None:
        self._serial += 1
        self._news.notify_all()
