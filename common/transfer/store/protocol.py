"""Store: immutable objects under /v{version}/{kind}/, a catalogue of them, and leases that keep them from being pruned.

An update is opened (its head becomes visible), its buckets are put one by one, then it is sealed with the manifest, or failed with
the publisher's own words. Readers may wait for an object that is still to come; they are told when it never will. Objects never
change: putting the same one again changes nothing, which makes every retry safe.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from common.transfer.errors import FarSideError, MalformedUpdateError, VersionGoneError
from common.transfer.manifest import UpdateHead, UpdateKey, parse_head

LEASE_TTL_S = 30.0
"""A holder renews at a third of this; a dead one's hold on old versions ends after it."""
RECEIVER_TTL_S = 600.0
"""A receiver that has confirmed nothing for this long no longer keeps old deltas alive."""
MAX_ERROR_CHARS = 2000

_OBJECT_NAME = re.compile(r"layout|manifest|[bp][0-9]{5,8}")
_HOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")

Parts = Sequence[bytes | memoryview]
Arrived = Callable[[memoryview, int], None]
"""Told, while a read is under way, of what has come so far and of how many bytes there will be. What it raises ends the read."""


def check_object_name(name: str) -> str:
    """The name, if it is one that an update may have: nothing that could leave its folder."""
    if not _OBJECT_NAME.fullmatch(name):
        raise MalformedUpdateError(f"{name!r:.80} is not the name of an object: layout, manifest, or b or p and five digits")
    return name


def check_holder(holder: str) -> str:
    if not _HOLDER.fullmatch(holder):
        raise MalformedUpdateError(f"{holder!r:.80} does not name a receiver: use up to 100 letters, digits, '.', '_' and '-'")
    return holder


class UpdateState(enum.StrEnum):
    OPEN = "open"
    SEALED = "sealed"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CatalogEntry:
    """One update that can be read. `wire_bytes` are those put so far; `error` is the publisher's text if it failed."""

    head: UpdateHead
    state: UpdateState
    wire_bytes: int
    error: str | None = None

    def to_json(self) -> dict[str, object]:
        return {"head": self.head.to_json(), "state": str(self.state), "wire_bytes": self.wire_bytes, "error": self.error}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Catalog:
    """All updates, oldest first. `tag` changes whenever an update is opened, sealed, failed or removed."""

    tag: str
    entries: tuple[CatalogEntry, ...]

    def find(self, key: UpdateKey) -> CatalogEntry | None:
        return next((entry for entry in self.entries if entry.head.key == key), None)


def parse_entry(fields: object) -> CatalogEntry:
    """The inverse of CatalogEntry.to_json for values from outside."""
    try:
        assert isinstance(fields, dict)
        error = fields["error"]
        state, wire_bytes = UpdateState(fields["state"]), fields["wire_bytes"]
        if type(wire_bytes) is not int or not (error is None or isinstance(error, str)):
            raise ValueError("wire_bytes or error has the wrong type")
        return CatalogEntry(head=parse_head(fields["head"]), state=state, wire_bytes=wire_bytes, error=error)
    except (AssertionError, KeyError, ValueError, TypeError) as e:
        raise MalformedUpdateError(f"catalogue entry {fields!r:.200}: {e}") from None


def gone(key: UpdateKey) -> VersionGoneError:
    return VersionGoneError(f"{key.path} is not in the store (pruned, withdrawn or never opened); look at the catalogue again")


def failed(key: UpdateKey, text: str) -> FarSideError:
    return FarSideError(f"the publisher gave up {key.path}: {text}")


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """The newest version a receiver has committed, and the seconds since it last said so."""

    version: int
    age_s: float


class Store(Protocol):
    """See the module. Thread-safe. Every method may block for as long as its medium takes; waits end by their `timeout_s`."""

    def catalog(self, *, after: str | None = None, timeout_s: float = 0.0) -> Catalog:
        """The catalogue, as soon as its tag differs from `after`, at the latest after `timeout_s`."""
        ...

    def open(self, head: UpdateHead) -> None:
        """Make an update visible. Opening the same head again changes nothing; another head under the key is a FarSideError."""
        ...

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        """Store one object, whole or not at all. The parts may change after the call. Safe to repeat.

        Raises:
            VersionGoneError: the update is not open any more.
            OutcomeUnknownError: the link broke; put it again.
        """
        ...

    def seal(self, key: UpdateKey, manifest: bytes) -> None:
        """Store the manifest: the update is complete. Safe to repeat."""
        ...

    def fail(self, key: UpdateKey, text: str) -> None:
        """Tell whoever reads or waits that the update will never be complete. Safe to repeat."""
        ...

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
        """Bytes of an object from `start` on, waiting until it exists. `timeout_s` bounds every time without progress.

        Args:
            length: how many bytes at most; None: to the end.
            into: memory to read into, which bounds what is taken; the result is a part of it, or of memory the store owns.
            arrived: called whenever more has come, by stores to which bytes come one by one; those that hold the object already
                need not call it. After a break it may start from less again, with the same bytes.

        Raises:
            VersionGoneError, FarSideError: it will not come.
            TransferTimeoutError: it did not come in time.
            MalformedUpdateError: the object is larger than `into`.
        """
        ...

    def lease(self, key: UpdateKey, holder: str, ttl_s: float = LEASE_TTL_S) -> None:
        """Keep an update from being removed for `ttl_s`; again to renew. Raises VersionGoneError if it is too late."""
        ...

    def release(self, key: UpdateKey, holder: str) -> None:
        """Give a lease up. Unknown ones change nothing."""
        ...

    def confirm(self, receiver: str, version: int) -> None:
        """Record that a receiver has committed a version."""
        ...

    def confirmations(self) -> dict[str, Confirmation]: ...

    def remove(self, key: UpdateKey, *, force: bool = False) -> bool:
        """Delete an update, a leased one only with `force`. False if a lease holds it. Unknown ones count as removed."""
        ...
