"""DirectoryStore: updates as files in a folder or below a URL, shared by processes that can see it; SharedMemoryStore on /dev/shm.

v{version}/{kind}/ holds head, buckets, manifest, and a file per lease; receivers/ holds what each has confirmed. There is no
server: waiting is polling. A lease and a removal cannot miss each other: the remover first leaves a tombstone and then looks for
leases, the reader first leaves its lease and then looks for the tombstone, so at least one of them sees the other.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import re
import time
from pathlib import Path

from common.clock import Clock
from common.transfer.errors import FarSideError, MalformedUpdateError, TransferTimeoutError
from common.transfer.manifest import MANIFEST_NAME, UpdateHead, UpdateKey, UpdateKind, parse_head
from common.transfer.store.files import Files, FsspecFiles, LocalFiles
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

log = logging.getLogger(__name__)

FIRST_POLL_S, LAST_POLL_S = 0.002, 0.1
"""Waiting starts with quick looks and backs off, so that an idle receiver costs ten looks a second."""

_VERSION = re.compile(r"v([0-9]{1,16})")


class WallClock:
    """Seconds since 1970: leases are compared between machines."""

    def now_s(self) -> float:
        return time.time()


class DirectoryStore:
    """A Store (see the protocol). `where` is a folder, or a URL such as gs://bucket/run7."""

    def __init__(self, where: str | Path, clock: Clock | None = None) -> None:
        remote = isinstance(where, str) and "://" in where
        self._files: Files = FsspecFiles(str(where)) if remote else LocalFiles(Path(where))
        self._clock = clock or WallClock()

    def catalog(self, *, after: str | None = None, timeout_s: float = 0.0) -> Catalog:
        waiting = _Backoff(timeout_s)
        while True:
            entries = tuple(self._entries())
            seen = [(entry.head.lineage, entry.head.key.path, entry.state) for entry in entries]
            tag = hashlib.sha256(repr(seen).encode()).hexdigest()[:16]
            if tag != after or not waiting.again():
                return Catalog(tag=tag, entries=entries)

    def _entries(self) -> list[CatalogEntry]:
        entries = []
        for folder in self._files.list(""):
            if match := _VERSION.fullmatch(folder):
                for kind in UpdateKind:
                    key = UpdateKey(int(match[1]), kind)
                    try:
                        entry = self._entry(key)
                    except MalformedUpdateError as e:  # a machine that died may leave it so; the others must stay readable
                        log.warning("%s is left out of the catalogue: %s", key.path, e)
                        continue
                    if entry is not None:
                        entries.append(entry)
        return sorted(entries, key=lambda entry: entry.head.key)

    def _entry(self, key: UpdateKey) -> CatalogEntry | None:
        listing = self._files.list(key.path)
        if "head" not in listing or "gone" in listing:
            return None
        content = self._files.read(f"{key.path}/head", 0, None, None)
        if content is None:
            return None
        head = parse_head(_json(f"{key.path}/head", content))
        if head.key != key:
            raise MalformedUpdateError(f"{key.path} holds the head of {head.key.path}")
        error = None
        if "error" in listing and MANIFEST_NAME not in listing:
            error = bytes(self._files.read(f"{key.path}/error", 0, 4 * MAX_ERROR_CHARS, None) or b"").decode(errors="replace")
        state = UpdateState.SEALED if MANIFEST_NAME in listing else UpdateState.FAILED if error else UpdateState.OPEN
        counted = [size or 0 for name, size in listing.items() if name == MANIFEST_NAME or re.fullmatch("b[0-9]+", name)]
        return CatalogEntry(head=head, state=state, wire_bytes=sum(counted), error=error)

    def open(self, head: UpdateHead) -> None:
        held = self._entry(head.key)
        if held is not None and held.head != head:
            raise FarSideError(f"{head.key.path} exists already with another head; versions must grow")
        if held is None:
            self._files.write(f"{head.key.path}/head", [json.dumps(head.to_json()).encode()])

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        path = f"{key.path}/{check_object_name(name)}"
        listing = self._files.list(key.path)
        if "head" not in listing:
            raise gone(key)
        if name in listing:
            held = self._files.read(path, 0, None, None)
            if held is not None and held != b"".join(parts):
                raise FarSideError(f"{key.path}/{name} exists already with other content; objects never change")
            return
        self._files.write(path, parts)

    def seal(self, key: UpdateKey, manifest: bytes) -> None:
        self.put(key, MANIFEST_NAME, [manifest])

    def fail(self, key: UpdateKey, text: str) -> None:
        if "head" in self._files.list(key.path):
            self._files.write(f"{key.path}/error", [text[:MAX_ERROR_CHARS].encode()])

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
        path = f"{key.path}/{check_object_name(name)}"
        waiting = _Backoff(timeout_s)
        while True:
            content = self._read_now(path, start, length, into)
            if content is not None:
                return content
            listing = self._files.list(key.path)
            if "head" not in listing:
                raise gone(key)
            if "error" in listing:
                entry = self._entry(key)
                raise failed(key, (entry and entry.error) or "no reason given")
            if not waiting.again():
                raise TransferTimeoutError(f"{path} did not come within {timeout_s} s")

    def _read_now(self, path: str, start: int, length: int | None, into: memoryview | None) -> memoryview | None:
        return self._files.read(path, start, length, into)

    def lease(self, key: UpdateKey, holder: str, ttl_s: float = LEASE_TTL_S) -> None:
        path = f"{key.path}/lease-{check_holder(holder)}"
        if "head" not in self._files.list(key.path):
            raise gone(key)
        self._files.write(path, [str(self._clock.now_s() + ttl_s).encode()])
        listing = self._files.list(key.path)
        if "head" not in listing or "gone" in listing:
            self._files.delete(path)
            if "head" not in listing:
                self._files.delete_tree(key.path)
            raise gone(key)

    def release(self, key: UpdateKey, holder: str) -> None:
        self._files.delete(f"{key.path}/lease-{check_holder(holder)}")

    def confirm(self, receiver: str, version: int) -> None:
        content = json.dumps([version, self._clock.now_s()]).encode()
        self._files.write(f"receivers/{check_holder(receiver)}", [content])

    def confirmations(self) -> dict[str, Confirmation]:
        found = {}
        for receiver in self._files.list("receivers"):
            content = self._files.read(f"receivers/{receiver}", 0, None, None)
            if content is not None:
                match _json(f"receivers/{receiver}", content):
                    case [int(version), float(at_s)]:
                        found[receiver] = Confirmation(version, self._clock.now_s() - at_s)
                    case other:
                        raise MalformedUpdateError(f"receivers/{receiver} holds {other!r:.80}, not [version, seconds]")
        return found

    def remove(self, key: UpdateKey, *, force: bool = False) -> bool:
        if not self._files.list(key.path):
            return True
        self._files.write(f"{key.path}/gone", [b""])
        if not force and self._leased(key):
            self._files.delete(f"{key.path}/gone")
            return False
        self._files.delete_tree(key.path)
        if not self._files.list(f"v{key.version}"):
            self._files.delete_tree(f"v{key.version}")
        return True

    def discard(self, key: UpdateKey, name: str) -> None:
        """Forget one object. For caches: a store that others read from never takes anything back but whole updates."""
        self._files.delete(f"{key.path}/{check_object_name(name)}")

    def _leased(self, key: UpdateKey) -> bool:
        now_s = self._clock.now_s()
        for name in self._files.list(key.path):
            if name.startswith("lease-"):
                content = self._files.read(f"{key.path}/{name}", 0, 64, None)
                if content is not None:
                    end_s = _json(f"{key.path}/{name}", content)
                    if not isinstance(end_s, float) or end_s > now_s:  # a lease that cannot be read still holds
                        return True
        return False


class SharedMemoryStore(DirectoryStore):
    """A DirectoryStore on the same machine whose reads are read-only mappings of the files: nothing is copied.

    A mapping stays valid when its update is removed; the memory is given back when the last reader lets go of it.
    """

    def __init__(self, name: str, clock: Clock | None = None, *, root: Path = Path("/dev/shm")) -> None:
        self.path = root / f"rose-{check_holder(name)}"
        super().__init__(self.path, clock)

    def _read_now(self, path: str, start: int, length: int | None, into: memoryview | None) -> memoryview | None:
        try:
            with (self.path / path).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError:  # an empty file cannot be mapped
            return memoryview(b"")
        content = memoryview(mapped)[start : None if length is None else start + length]
        if into is not None and len(content) > len(into):
            raise MalformedUpdateError(f"{path} has {len(content)} bytes where at most {len(into)} are possible")
        return content


def _json(path: str, content: memoryview) -> object:
    try:
        return json.loads(bytes(content))
    except (ValueError, RecursionError) as e:
        raise MalformedUpdateError(f"{path} is not JSON: {e}") from None


class _Backoff:
    """Sleeps between looks, longer and longer, until the time is up."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline_s = time.monotonic() + timeout_s
        self._pause_s = FIRST_POLL_S

    def again(self) -> bool:
        """Sleep, then True; or False at once when the time is up."""
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(self._pause_s, left_s))
        self._pause_s = min(1.5 * self._pause_s, LAST_POLL_S)
        return True
