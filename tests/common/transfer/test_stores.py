"""The Store protocol, promise by promise, over every store."""

import threading
import time
from pathlib import Path

import pytest

from common.clock import FakeClock
from common.transfer.errors import FarSideError, MalformedUpdateError, TransferTimeoutError, VersionGoneError
from common.transfer.manifest import UpdateHead, UpdateKey, UpdateKind
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store, UpdateState


def head(version: int, base_version: int | None = None) -> UpdateHead:
    return UpdateHead(
        version=version, base_version=base_version, lineage="life1", layout_digest="abc", num_buckets=2, dense_bytes=1000
    )


DELTA = UpdateKey(3, UpdateKind.DELTA)


def test_an_update_is_opened_filled_and_sealed(store: Store) -> None:
    empty = store.catalog()
    store.open(head(3, 2))
    store.open(head(3, 2))
    opened = store.catalog()
    assert opened.tag != empty.tag
    assert [entry.state for entry in opened.entries] == [UpdateState.OPEN]
    for _ in range(2):
        store.put(DELTA, "b00000", [b"abc", memoryview(b"def")])
    assert bytes(store.read(DELTA, "b00000", timeout_s=1.0)) == b"abcdef"
    store.seal(DELTA, b"manifest")
    entry = store.catalog().find(DELTA)
    assert entry is not None
    assert (entry.head, entry.state, entry.wire_bytes) == (head(3, 2), UpdateState.SEALED, 14)
    assert store.catalog(after=opened.tag, timeout_s=5.0).tag != opened.tag


def test_parts_of_objects_can_be_read_into_memory_of_the_caller(store: Store) -> None:
    store.open(head(3, 2))
    content = bytes(range(200)) * 50
    store.put(DELTA, "b00001", [content])
    room = memoryview(bytearray(20_000))
    for start, length in ((0, None), (0, 10), (77, 100), (9_990, 100), (9_999, None)):
        end = None if length is None else start + length
        assert bytes(store.read(DELTA, "b00001", start=start, length=length, into=room, timeout_s=1.0)) == content[start:end]
    with pytest.raises(MalformedUpdateError, match="at most 100"):
        store.read(DELTA, "b00001", into=room[:100], timeout_s=1.0)


def test_objects_never_change(store: Store) -> None:
    store.open(head(3, 2))
    store.put(DELTA, "b00000", [b"abc"])
    with pytest.raises(FarSideError, match="never change"):
        store.put(DELTA, "b00000", [b"abd"])
    with pytest.raises(FarSideError, match="another head"):
        store.open(head(3, 1))
    assert bytes(store.read(DELTA, "b00000", timeout_s=1.0)) == b"abc"


def test_readers_wait_for_what_is_still_to_come(store: Store) -> None:
    store.open(head(3, 2))
    later = threading.Timer(0.1, lambda: store.put(DELTA, "b00000", [b"late"]))
    later.start()
    assert bytes(store.read(DELTA, "b00000", timeout_s=10.0)) == b"late"
    later.join()
    started_s = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="b00001"):
        store.read(DELTA, "b00001", timeout_s=0.15)
    assert time.monotonic() - started_s < 5


def test_readers_are_told_when_nothing_will_come_and_why(store: Store) -> None:
    store.open(head(3, 2))
    later = threading.Timer(0.1, lambda: store.fail(DELTA, "the learner ran out of memory"))
    later.start()
    with pytest.raises(FarSideError, match="ran out of memory"):
        store.read(DELTA, "b00000", timeout_s=10.0)
    later.join()
    entry = store.catalog().find(DELTA)
    assert entry is not None
    assert entry.state is UpdateState.FAILED
    assert entry.error == "the learner ran out of memory"


def test_what_is_not_there_is_gone(store: Store) -> None:
    with pytest.raises(VersionGoneError, match="v3/delta"):
        store.read(DELTA, "b00000", timeout_s=0.1)
    with pytest.raises(VersionGoneError):
        store.lease(DELTA, "r1")
    store.release(DELTA, "r1")
    assert store.remove(DELTA)


def test_a_leased_update_is_not_removed(store: Store) -> None:
    store.open(head(3, 2))
    store.put(DELTA, "b00000", [b"abc"])
    store.lease(DELTA, "r1")
    store.lease(DELTA, "r2")
    assert not store.remove(DELTA)
    store.release(DELTA, "r1")
    assert not store.remove(DELTA)
    assert bytes(store.read(DELTA, "b00000", timeout_s=1.0)) == b"abc"
    store.release(DELTA, "r2")
    assert store.remove(DELTA)
    assert store.catalog().entries == ()
    store.open(head(3, 2))
    store.lease(DELTA, "r1")
    assert store.remove(DELTA, force=True)


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_a_lease_that_nobody_renews_ends(kind: str, tmp_path: Path) -> None:
    clock = FakeClock(1000.0)
    store: Store = MemoryStore(clock) if kind == "memory" else DirectoryStore(tmp_path, clock)
    store.open(head(3, 2))
    store.lease(DELTA, "r1", 30.0)
    clock.advance(29.0)
    assert not store.remove(DELTA)
    store.lease(DELTA, "r1", 30.0)
    clock.advance(29.0)
    assert not store.remove(DELTA)
    clock.advance(2.0)
    assert store.remove(DELTA)


def test_confirmations_are_kept_per_receiver(store: Store) -> None:
    store.confirm("r1", 4)
    store.confirm("r2", 3)
    store.confirm("r1", 5)
    found = store.confirmations()
    assert {name: c.version for name, c in found.items()} == {"r1": 5, "r2": 3}
    assert all(0 <= c.age_s < 10 for c in found.values())


@pytest.mark.parametrize("name", ["../head", "/etc/passwd", "b0", "b00000/..", "head", "lease-x", "B00000", "", "manifest\n"])
def test_names_cannot_leave_their_folder(store: Store, name: str) -> None:
    store.open(head(3, 2))
    with pytest.raises(MalformedUpdateError):
        store.put(DELTA, name, [b"x"])
    with pytest.raises(MalformedUpdateError):
        store.read(DELTA, name, timeout_s=0.1)


@pytest.mark.parametrize("holder", ["../x", "a/b", "", ".hidden", "a" * 101, "a b"])
def test_holders_have_plain_names(store: Store, holder: str) -> None:
    store.open(head(3, 2))
    with pytest.raises((MalformedUpdateError, FarSideError)):
        store.lease(DELTA, holder)
    with pytest.raises((MalformedUpdateError, FarSideError)):
        store.confirm(holder, 1)
