"""The relay: every object once over the slow link, nothing torn from its cache, and errors that say whose fault they are."""

import concurrent.futures
import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.transfer import shards
from common.transfer.cache import ObjectCache
from common.transfer.errors import AuthenticationError, FarSideError, TransferError, TransferTimeoutError, UnreachableError
from common.transfer.manifest import UpdateKey, UpdateKind
from common.transfer.publisher import Publisher
from common.transfer.relay import RelayStore
from common.transfer.secrets import Secret
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Arrived, Parts, Store
from tests.common.transfer.models import Weights, assert_equal_bits, make_model, small_step
from tests.common.transfer.test_cases import replica_of
from tests.common.transfer.test_stores import head
from tests.common.transfer.test_sync import fine_layout

ANCHOR, DELTA = UpdateKey(0, UpdateKind.ANCHOR), UpdateKey(1, UpdateKind.DELTA)
ROOM = 1 << 30


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUCKET_BYTES", 40_000)


class Upstream(MemoryStore):
    """Counts the reads of each object, changes bytes on the way, and fails, all as told."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[tuple[UpdateKey, str]] = Counter()
        self.on_read: Callable[[UpdateKey, str, memoryview], memoryview] = lambda key, name, content: content
        self.down = False

    def _check_up(self) -> None:
        if self.down:
            raise UnreachableError("learner-0 is away")

    def catalog(self, **kwargs: object) -> object:  # type: ignore[override]
        self._check_up()
        return super().catalog(**kwargs)  # type: ignore[arg-type]

    def lease(self, *args: object) -> None:
        self._check_up()
        super().lease(*args)  # type: ignore[arg-type]

    def read(self, key: UpdateKey, name: str, *, arrived: Arrived | None = None, **kwargs: object) -> memoryview:  # type: ignore[override]
        self._check_up()
        content = super().read(key, name, **kwargs)  # type: ignore[arg-type]
        self.reads[key, name] += 1
        return self.on_read(key, name, content)


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def model(upstream: Upstream) -> Weights:
    """Version 1, published as an anchor of version 0 and a delta, in several buckets."""
    publisher = Publisher(upstream, lay_out=fine_layout)  # type: ignore[arg-type]
    model = make_model()
    publisher.publish(0, model).result(10)
    model = small_step(model, 1)
    publisher.publish(1, model).result(10)
    publisher.close()
    return model


@pytest.fixture
def make_relay(upstream: Upstream) -> Iterator[Callable[..., RelayStore]]:
    relays = []

    def make(cache: Store | None = None, *, max_bytes: int = ROOM, behind: Store | None = None) -> RelayStore:
        relays.append(RelayStore(behind or upstream, ObjectCache(cache or MemoryStore(), max_bytes=max_bytes)))
        return relays[-1]

    yield make
    for relay in relays:
        relay.close()


def follow(store: Store, model: Weights, name: str = "r", *, timeout_s: float = 5.0) -> Weights:
    """What a new replica holds after its first commit."""
    arrays, subscriber = replica_of(store, model, name, timeout_s)
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    subscriber.close()
    return arrays


def objects(store: Store) -> dict[tuple[UpdateKey, str], bytes]:
    """Everything that is in a store."""
    found = {}
    for entry in store.catalog().entries:
        names = ["manifest", *(f"b{i:05d}" for i in range(entry.head.num_buckets))]
        names += ["layout"] if entry.head.base_version is None else []
        for name in names:
            found[entry.head.key, name] = bytes(store.read(entry.head.key, name, timeout_s=1.0))
    return found


def test_many_receivers_and_any_ranges_cost_one_read_of_every_object(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], token: Secret
) -> None:
    whole = objects(upstream)
    upstream.reads.clear()
    server = StoreServer(make_relay(), token=token)

    def read_ranges(seed: int) -> None:
        rng, store = np.random.default_rng(seed), HttpStore(server.url, token=token)
        for where in rng.permutation(len(whole)):
            (key, name), content = list(whole.items())[where]
            start = int(rng.integers(0, len(content)))
            length = int(rng.integers(1, len(content) + 100))
            assert bytes(store.read(key, name, start=start, length=length, timeout_s=10.0)) == content[start : start + length]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read_ranges, range(8)))
        replicas = list(pool.map(lambda i: follow(HttpStore(server.url, token=token), model, f"r{i}"), range(4)))
    for arrays in replicas:
        assert_equal_bits(arrays, model)
    assert dict(upstream.reads) == dict.fromkeys(whole, 1)
    assert {name: c.version for name, c in upstream.confirmations().items()} == {f"r{i}": 1 for i in range(4)}
    server.close()


def test_who_only_wants_an_index_costs_the_link_an_index(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore]
) -> None:
    whole = objects(upstream)
    lengths = []
    upstream.reads.clear()
    upstream.on_read = lambda key, name, content: lengths.append(len(content)) or content  # type: ignore[func-returns-value]
    relay = make_relay()
    for _ in range(3):
        assert bytes(relay.read(ANCHOR, "b00000", length=500, timeout_s=1.0)) == whole[ANCHOR, "b00000"][:500]
    assert [length for length in lengths if length == 500] == [500]
    assert upstream.reads[ANCHOR, "b00000"] == 1
    assert bytes(relay.read(ANCHOR, "b00000", start=500, length=500, timeout_s=1.0)) == whole[ANCHOR, "b00000"][500:1000]
    assert bytes(relay.read(ANCHOR, "b00000", length=700, timeout_s=1.0)) == whole[ANCHOR, "b00000"][:700]
    assert upstream.reads[ANCHOR, "b00000"] == 2


def test_bytes_are_passed_on_while_the_object_still_arrives(upstream: Upstream, token: Secret) -> None:
    """Over two hops of HTTP: the front of a bucket is read, and seen, before its end has left the learner."""
    content = np.random.default_rng(0).integers(0, 256, 900_000, dtype=np.uint8).tobytes()
    front_is_there, go_on = threading.Event(), threading.Event()

    class Gate(MemoryStore):
        def read(self, *args: object, arrived: Arrived | None = None, **kwargs: object) -> memoryview:
            whole = super().read(*args, **kwargs)  # type: ignore[arg-type]
            if arrived is not None and len(whole) > 600_000:
                arrived(whole[:600_000], len(whole))
                assert go_on.wait(10)
            return whole

    gate = Gate()
    gate.open(head(3, 2))
    key = head(3, 2).key
    gate.put(key, "b00000", [content])
    learner = StoreServer(gate, token=token)
    relay = RelayStore(HttpStore(learner.url, token=token), ObjectCache(MemoryStore(), max_bytes=ROOM))
    near = StoreServer(relay, token=token)
    store = HttpStore(near.url, token=token)
    assert bytes(store.read(key, "b00000", length=1000, timeout_s=10.0)) == content[:1000]
    assert bytes(store.read(key, "b00000", start=400_000, length=100_000, timeout_s=10.0)) == content[400_000:500_000]

    def seen(part: memoryview, num_bytes: int) -> None:
        assert num_bytes == len(content)
        if len(part) >= 500_000:
            front_is_there.set()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, key, "b00000", timeout_s=10.0, arrived=seen)
        assert front_is_there.wait(10)
        assert not reading.done()
        go_on.set()
        assert bytes(reading.result(10)) == content
    for closing in (near, relay, learner):
        closing.close()


@pytest.mark.parametrize("name", ["b00000", "b00002", "manifest", "layout", "head"])
@pytest.mark.parametrize(
    "damage", [lambda c: c[: len(c) // 2], lambda c: b"", lambda c: c[:-1] + bytes([c[-1] ^ 1]), lambda c: c + b"x"]
)
def test_a_relay_that_starts_again_uses_its_cache_but_nothing_torn(
    upstream: Upstream,
    model: Weights,
    make_relay: Callable[..., RelayStore],
    tmp_path: Path,
    name: str,
    damage: Callable[[bytes], bytes],
) -> None:
    first = make_relay(DirectoryStore(tmp_path))
    assert_equal_bits(follow(first, model), model)
    first.close()
    torn = tmp_path / "v0/anchor" / name
    torn.write_bytes(damage(torn.read_bytes()))
    before = objects(upstream)
    upstream.reads.clear()
    again = make_relay(DirectoryStore(tmp_path))
    assert_equal_bits(follow(again, model, "r2"), model)
    assert objects(again) == before
    assert max(upstream.reads.values(), default=0) <= 1
    assert all(key == ANCHOR for key, _ in upstream.reads)


def test_a_relay_that_starts_again_fetches_nothing_twice(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    first = make_relay(DirectoryStore(tmp_path))
    follow(first, model)
    first.close()
    upstream.reads.clear()
    assert_equal_bits(follow(make_relay(DirectoryStore(tmp_path)), model, "r2"), model)
    assert not upstream.reads


def test_a_file_that_is_cut_while_the_relay_runs_is_fetched_again(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    relay = make_relay(DirectoryStore(tmp_path))
    follow(relay, model)
    whole = objects(upstream)
    with (tmp_path / "v0/anchor/b00001").open("r+b") as file:
        file.truncate(100)
    assert bytes(relay.read(ANCHOR, "b00001", start=50, length=5000, timeout_s=1.0)) == whole[ANCHOR, "b00001"][50:5050]
    assert objects(relay) == whole


def test_while_upstream_is_away_the_cache_is_served_and_the_rest_says_why(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    relay = make_relay(DirectoryStore(tmp_path))
    follow(relay, model)
    relay.close()
    upstream.down = True
    with pytest.raises(UnreachableError, match="learner-0 is away"):
        make_relay().catalog()
    alone = make_relay(DirectoryStore(tmp_path))
    arrays, subscriber = replica_of(alone, model, "late")
    staged = subscriber.stage()
    assert staged is not None
    assert staged.version == 1
    with pytest.raises(UnreachableError):
        alone.lease(UpdateKey(7, UpdateKind.DELTA), "late")
    upstream.down = False
    subscriber.commit(staged)
    assert_equal_bits(arrays, model)
    assert subscriber.poll(0.0) is None
    assert upstream.confirmations()["late"].version == 1
    publisher_model = small_step(model, 2)
    Publisher(upstream).publish(2, publisher_model).result(10)
    assert subscriber.poll(10.0) == 2
    upstream.down = True
    with pytest.raises(TransferTimeoutError, match="learner-0 is away"):
        alone.read(UpdateKey(2, UpdateKind.ANCHOR), "b00000", timeout_s=0.2)
    subscriber.close()


def test_a_dead_learner_is_named_through_the_relay(token: Secret, model: Weights, upstream: Upstream) -> None:
    learner = StoreServer(upstream, token=token)
    relay = RelayStore(HttpStore(learner.url, token=token, timeout_s=1.0), ObjectCache(MemoryStore(), max_bytes=ROOM))
    near = StoreServer(relay, token=token)
    store = HttpStore(near.url, token=token)
    assert len(store.catalog().entries) == 2
    learner.close()
    with pytest.raises(UnreachableError, match=f"127.0.0.1:{learner.port}.*refused"):
        store.read(ANCHOR, "b00000", timeout_s=3.0)
    near.close()
    relay.close()


def test_a_wrong_token_upstream_is_told_to_the_readers(token: Secret, upstream: Upstream) -> None:
    learner = StoreServer(upstream, token=token)
    relay = RelayStore(HttpStore(learner.url, token=Secret(b"x" * 20, "test")), ObjectCache(MemoryStore(), max_bytes=ROOM))
    near = StoreServer(relay, token=token)
    with pytest.raises(TransferError, match="missing or wrong token"):
        HttpStore(near.url, token=token).catalog()
    with pytest.raises(AuthenticationError):
        HttpStore(near.url).catalog()
    for closing in (near, relay, learner):
        closing.close()


def test_a_server_that_only_reads_takes_no_writes(token: Secret, upstream: Upstream, model: Weights) -> None:
    server = StoreServer(upstream, token=token, read_only=True)
    store = HttpStore(server.url, token=token)
    store.lease(ANCHOR, "r")
    for act in (lambda: store.put(ANCHOR, "b00009", [b"x"]), lambda: store.fail(ANCHOR, "x"), lambda: store.remove(ANCHOR)):
        with pytest.raises(AuthenticationError, match="only reads"):
            act()
    server.close()


def test_the_same_version_of_another_life_is_not_taken_from_the_cache(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    relay = make_relay(DirectoryStore(tmp_path))
    follow(relay, model)
    other = make_model(5)
    publisher = Publisher(upstream, lay_out=fine_layout)  # type: ignore[arg-type]
    publisher.publish(0, other).result(10)
    publisher.close()
    tag = ""
    while len(relay.catalog(after=tag, timeout_s=5.0).entries) != 1:
        tag = relay.catalog().tag
    assert_equal_bits(follow(relay, other, "r2"), other)
    assert objects(relay) == objects(upstream)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "receivers") == ["v0"]


def test_what_upstream_removes_leaves_the_cache(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    relay = make_relay(DirectoryStore(tmp_path))
    objects(relay)
    assert (tmp_path / "v1/delta/b00000").exists()
    tag = relay.catalog().tag
    upstream.remove(DELTA)
    relay.catalog(after=tag, timeout_s=10.0)
    assert not (tmp_path / "v1").exists()
    assert (tmp_path / "v0/anchor/b00000").exists()


def test_the_cache_is_bounded_and_drops_what_was_not_read_for_longest(model: Weights, upstream: Upstream) -> None:
    sizes = {entry.head.key: entry.wire_bytes for entry in upstream.catalog().entries}
    cache = ObjectCache(MemoryStore(), max_bytes=sizes[ANCHOR] + sizes[DELTA] // 2 + 2000)
    relay = RelayStore(upstream, cache)
    whole = objects(relay)
    assert cache.has(DELTA)
    assert not cache.has(ANCHOR)
    assert objects(relay) == whole == objects(upstream)
    assert cache.num_bytes <= sizes[ANCHOR] + sizes[DELTA] // 2 + 2000
    relay.close()
    tiny = RelayStore(upstream, ObjectCache(MemoryStore(), max_bytes=10))
    assert objects(tiny) == whole
    tiny.close()
    with pytest.raises(ValueError, match="max_bytes=0"):
        ObjectCache(MemoryStore(), max_bytes=0)


def test_a_full_disk_costs_fetches_and_nothing_else(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore]
) -> None:
    class FullDisk(MemoryStore):
        full = True

        def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
            if self.full and name == "b00001":
                raise OSError(errno.ENOSPC, "No space left on device")
            super().put(key, name, parts)

    disk = FullDisk()
    relay = make_relay(disk)
    assert_equal_bits(follow(relay, model), model)
    disk.full = False
    upstream.reads.clear()
    assert_equal_bits(follow(relay, model, "r2"), model)
    assert {name for key, name in upstream.reads if key == DELTA} == {"b00001"}


def test_two_relays_may_share_a_folder(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    relays = [make_relay(DirectoryStore(tmp_path)) for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replicas = list(pool.map(lambda i: follow(relays[i % 2], model, f"r{i}"), range(4)))
    for arrays in replicas:
        assert_equal_bits(arrays, model)
    assert max(upstream.reads.values()) <= 2
    relays[0].close()
    assert objects(relays[1]) == objects(upstream)


def test_bytes_damaged_on_the_way_are_fetched_again_and_not_kept(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore], tmp_path: Path
) -> None:
    whole = objects(upstream)
    upstream.reads.clear()

    def flip_first(key: UpdateKey, name: str, content: memoryview) -> memoryview:
        if upstream.reads[key, name] > 1 or name == "manifest":
            return content
        return memoryview(bytes(content[:-1]) + bytes([content[-1] ^ 1]))

    upstream.on_read = flip_first
    relay = make_relay(DirectoryStore(tmp_path))
    assert objects(relay) == whole
    assert objects(relay) == whole
    assert max(upstream.reads.values()) == 2


def test_a_version_is_pinned_upstream_for_who_fetches_it_through_the_relay(
    upstream: Upstream, model: Weights, make_relay: Callable[..., RelayStore]
) -> None:
    relay = make_relay()
    relay.lease(ANCHOR, "r1")
    assert not upstream.remove(ANCHOR)
    relay.release(ANCHOR, "r1")
    assert upstream.remove(ANCHOR)


def test_a_failed_update_is_failed_through_the_relay(upstream: Upstream, make_relay: Callable[..., RelayStore]) -> None:
    upstream.open(head(3, 2))
    relay = make_relay()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(relay.read, head(3, 2).key, "b00000", timeout_s=10.0)
        upstream.fail(head(3, 2).key, "the learner ran out of memory")
        with pytest.raises(FarSideError, match="ran out of memory"):
            reading.result(10)


def test_a_catalogue_that_was_asked_for_earlier_and_came_later_takes_nothing_back() -> None:
    """Else what a publisher has just opened through the relay is not open when its first object comes."""
    held, let_go, asked_again, looked = (threading.Event() for _ in range(4))

    class Slow(MemoryStore):
        def catalog(self, **kwargs: object) -> object:  # type: ignore[override]
            if threading.current_thread().name != "relay-catalog":
                return super().catalog(**kwargs)  # type: ignore[arg-type]
            if held.is_set():
                asked_again.set()
                assert looked.wait(10)
            catalog = super().catalog(**kwargs)  # type: ignore[arg-type]
            if catalog.entries and not held.is_set():
                held.set()
                assert let_go.wait(10)
            return catalog

    upstream = Slow()
    relay = RelayStore(upstream, ObjectCache(MemoryStore(), max_bytes=ROOM))
    try:
        relay.catalog()
        upstream.open(head(0))
        assert held.wait(10)
        relay.open(head(1))
        let_go.set()
        assert asked_again.wait(10)
        assert relay.catalog().find(head(1).key) is not None
        looked.set()
        upstream.open(head(2))
        tag = relay.catalog().tag
        while relay.catalog().find(head(2).key) is None:
            tag = relay.catalog(after=tag, timeout_s=10).tag
        assert relay.catalog().find(head(1).key) is not None
    finally:
        let_go.set()
        looked.set()
        relay.close()
