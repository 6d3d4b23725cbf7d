"""Replicas that feed each other, over real HTTP: who is asked, what happens when that one is dead, slow or lies."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from common.errors import ReplicaUnavailableError
from common.serving.fake import FakeEngine
from common.serving.fake_model import make_weights
from common.serving.replica import LocalReplica
from common.transfer import peers, shards
from common.transfer.cache import ObjectCache
from common.transfer.errors import TransferTimeoutError
from common.transfer.manifest import BucketWriter, Manifest, UpdateKey, UpdateKind, check_bucket
from common.transfer.peer_store import Peer
from common.transfer.peers import PeerRegistry
from common.transfer.publisher import Publisher
from common.transfer.relay import RelayStore
from common.transfer.secrets import Secret
from common.transfer.staging import StagedUpdate
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Arrived, Store
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from common.types import Request, SamplingKey, SamplingParams
from tests.common.transfer.models import assert_equal_bits, blank, make_model, small_step
from tests.common.transfer.test_stores import head
from tests.common.transfer.test_sync import fine_layout

VOCAB_SIZE = 20
KEY = b"0123456789abcdef"
HEARTBEAT_S = 0.05
PATIENCE_S = 0.3


class FakeEngineTarget(NumpyTarget):
    """Hands what is committed to the engine that serves it."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._arrays = {name: np.zeros_like(value) for name, value in make_weights(0, VOCAB_SIZE).items()}
        super().__init__(self._arrays)

    def apply(self, update: StagedUpdate) -> None:
        super().apply(update)
        self._engine.commit(self._arrays, version=update.version)


def request(number: int) -> Request:
    key = SamplingKey(run_seed=0, trajectory_id=number, turn_idx=0)
    return Request(request_id=f"q{number}", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=2), key=key)


class CountingRelay(RelayStore):
    """Counts the bytes of buckets that each hop below asks for."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.reads: Counter[tuple[UpdateKey, str]] = Counter()
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def read(self, key: UpdateKey, name: str, **kwargs: object) -> memoryview:  # type: ignore[override]
        content = super().read(key, name, **kwargs)  # type: ignore[arg-type]
        if kwargs.get("length") != 1:  # a look whether it is there
            self.reads[key, name] += 1
        return content


class Cluster:
    """A learner, a relay with a registry, and peers."""

    def __init__(self, token: Secret, fan_out: int) -> None:
        self.token, self.upstream = token, MemoryStore()
        self.publisher = Publisher(self.upstream, key=KEY, lay_out=fine_layout)  # type: ignore[arg-type]
        self.relay = CountingRelay(self.upstream, ObjectCache(MemoryStore(), max_bytes=1 << 30))
        self.registry = PeerRegistry(fan_out)
        self.relay_server = StoreServer(self.relay, token=token, read_only=True, on_peer=self.registry.on_peer)
        self.peers: dict[str, Peer] = {}
        self.model = make_model()
        self.publish(0)

    def publish(self, version: int) -> None:
        self.model = small_step(self.model, version)
        self.publisher.publish(version, self.model).result(10)

    def relay_store(self) -> HttpStore:
        return HttpStore(self.relay_server.url, token=self.token, timeout_s=5.0)

    def add(self, name: str) -> Peer:
        cache = ObjectCache(MemoryStore(), max_bytes=1 << 30, key=KEY)
        relay = self.relay_store()
        peer = Peer(relay, cache, name=name, token=self.token, patience_s=PATIENCE_S, heartbeat_s=HEARTBEAT_S)
        self.peers[name] = peer
        return peer

    def follow(self, name: str) -> None:
        arrays = blank(self.model)
        subscriber = Subscriber(self.peers[name].store, NumpyTarget(arrays), receiver_id=name, key=KEY, timeout_s=5.0)
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        subscriber.close()
        assert_equal_bits(arrays, self.model)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.relay_server.close()
        self.relay.close()
        self.publisher.close()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "BUCKET_BYTES", 40_000)


@pytest.fixture
def cluster(token: Secret) -> Iterator[Cluster]:
    cluster = Cluster(token, fan_out=1)
    yield cluster
    cluster.close()


class Impostor:
    """Stands in the tree as a peer whose store does as told."""

    def __init__(self, cluster: Cluster, store: Store, name: str) -> None:
        self.server = StoreServer(store, token=cluster.token, read_only=True)
        self._hello = lambda leaving: cluster.relay_store().post(
            "/peer", {"name": name, "url": self.server.url, "leaving": leaving, "reports": []}
        )
        self._hello(False)
        self._closed = threading.Event()
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        while not self._closed.wait(1.0):
            with contextlib.suppress(Exception):
                self._hello(False)

    def close(self) -> None:
        self._closed.set()
        self.server.close()


class Meddler(RelayStore):
    """A relay that changes the bytes of buckets on their way out."""

    def __init__(self, upstream: Store, change: Callable[[UpdateKey, memoryview, Arrived | None], memoryview]) -> None:
        self._change = change
        super().__init__(upstream, ObjectCache(MemoryStore(), max_bytes=1 << 30))

    def read(self, key: UpdateKey, name: str, *, arrived: Arrived | None = None, **kwargs: object) -> memoryview:  # type: ignore[override]
        content = super().read(key, name, **kwargs)  # type: ignore[arg-type]
        return self._change(key, content, arrived) if name.startswith("b") else content


def test_a_chain_of_replicas_costs_the_relay_one_copy(cluster: Cluster) -> None:
    names = [f"p{i}" for i in range(4)]
    for name in names:
        cluster.add(name)
    assert [cluster.peers[name].parent_name for name in names] == [None, "p0", "p1", "p2"]
    for version in (1, 2):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(cluster.follow, names))
        buckets = {where: count for where, count in cluster.relay.reads.items() if where[1].startswith("b")}
        assert len(buckets) >= 5 * version
        assert set(buckets.values()) == {1}
        cluster.publish(version)
    assert {name: c.version for name, c in cluster.upstream.confirmations().items()} == dict.fromkeys(names, 1)


def test_a_new_replica_takes_the_newest_version_from_a_peer_and_no_rollout_before(cluster: Cluster) -> None:
    publisher = Publisher(cluster.upstream, key=KEY)
    for version in (5, 6):
        publisher.publish(version, make_weights(version, VOCAB_SIZE)).result(10)
    publisher.close()

    async def join(name: str) -> int:
        engine = FakeEngine(make_weights(99, VOCAB_SIZE), max_slots=1, max_context_tokens=64)
        subscriber = Subscriber(cluster.add(name).store, FakeEngineTarget(engine), receiver_id=name, key=KEY)
        async with LocalReplica(name, engine, subscriber, max_step_tokens=64) as replica:
            with pytest.raises(ReplicaUnavailableError, match="no weights yet"):
                await replica.generate(request(0))
            await replica.stage()
            with pytest.raises(ReplicaUnavailableError, match="no weights yet"):
                await replica.generate(request(0))
            assert await replica.commit() == 6
            assert set((await replica.generate(request(1))).weight_versions) == {6}
        subscriber.close()
        return sum(count for (_, name), count in cluster.relay.reads.items() if name.startswith("b"))

    read_by_first = asyncio.run(join("p0"))
    assert read_by_first > 0
    assert asyncio.run(join("p1")) == read_by_first


def test_case_17_a_dead_parent_costs_a_moment_and_nobody_is_sent_to_it_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "EXPIRY_S", 1.0)
    for name in ("p0", "p1", "p2"):
        cluster.add(name)
    cluster.peers["p1"]._parents._closed = True  # dies without a word
    cluster.peers.pop("p1")._server.close()
    cluster.follow("p2")
    deadline_s = time.monotonic() + 20
    while cluster.peers["p2"].parent_name != "p0" and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert cluster.peers["p2"].parent_name == "p0"
    cluster.publish(1)
    cluster.follow("p2")


def test_a_parent_that_lies_is_found_out_by_checksum_and_dropped(cluster: Cluster) -> None:
    liar = Impostor(cluster, Meddler(cluster.relay, lambda key, content, _: memoryview(bytes(len(content)))), "liar")
    cluster.add("p1")
    assert cluster.peers["p1"].parent_name == "liar"
    cluster.follow("p1")
    assert cluster.peers["p1"].parent_name is None
    cluster.add("p2")
    assert cluster.peers["p2"].parent_name == "p1"
    cluster.follow("p2")
    liar.close()


def test_a_forged_bucket_that_adds_up_is_found_out_by_the_manifest(cluster: Cluster) -> None:
    def forge(key: UpdateKey, content: memoryview, _: Arrived | None) -> memoryview:
        return memoryview(b"".join(BucketWriter(digests=True).finish()[0]))  # a right bucket without runs

    liar = Impostor(cluster, Meddler(cluster.relay, forge), "liar")
    cluster.add("p1")
    assert cluster.peers["p1"].parent_name == "liar"
    cluster.follow("p1")  # sealed: the manifest came first
    assert cluster.peers["p1"].parent_name is None
    liar.close()


def test_a_forged_bucket_of_an_open_update_is_given_up_when_the_manifest_comes(cluster: Cluster) -> None:
    bucket, other = (memoryview(b"".join(BucketWriter(digests=digests).finish()[0])) for digests in (True, False))
    liar = Impostor(cluster, Meddler(cluster.relay, lambda key, content, _: other), "liar")
    cluster.add("p1")
    opened = dataclasses.replace(head(1, 0), num_buckets=1)
    cluster.upstream.open(opened)
    cluster.upstream.put(opened.key, "b00000", [bucket])
    store = cluster.peers["p1"].store
    deadline_s = time.monotonic() + 20
    while opened.key not in {entry.head.key for entry in store.catalog().entries} and time.monotonic() < deadline_s:
        time.sleep(0.02)  # a relay knows of an update once its standing question is answered
    assert store.read(opened.key, "b00000", timeout_s=5.0) == other
    manifest = Manifest(head=opened, buckets=(check_bucket(bucket),), fingerprints={}, changed_elements=0)
    cluster.upstream.seal(opened.key, manifest.to_bytes(KEY))
    deadline_s = time.monotonic() + 20
    while store.read(opened.key, "b00000", timeout_s=5.0) != bucket and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert store.read(opened.key, "b00000", timeout_s=5.0) == bucket
    assert cluster.peers["p1"].parent_name is None
    liar.close()


def test_a_parent_that_answers_byte_by_byte_is_left_for_the_relay(cluster: Cluster) -> None:
    stop = threading.Event()

    def trickle(key: UpdateKey, content: memoryview, arrived: Arrived | None) -> memoryview:
        assert arrived is not None
        for end in range(1, len(content)):
            arrived(content[:end], len(content))
            if stop.wait(0.02):
                break
        return content

    slow = Impostor(cluster, Meddler(cluster.relay, trickle), "slow")
    cluster.add("p1")
    cluster.follow("p1")
    assert cluster.peers["p1"].parent_name is None
    stop.set()
    slow.close()


def test_a_parent_that_never_sends_is_left_for_the_relay(cluster: Cluster) -> None:
    class Silent(RelayStore):
        def read(self, key: UpdateKey, name: str, **kwargs: object) -> memoryview:  # type: ignore[override]
            raise TransferTimeoutError("not yet")

    silent = Impostor(cluster, Silent(cluster.relay, ObjectCache(MemoryStore(), max_bytes=1 << 30)), "silent")
    cluster.add("p1")
    assert cluster.peers["p1"].parent_name == "silent"
    cluster.follow("p1")
    assert cluster.peers["p1"].parent_name is None
    silent.close()


def test_a_learner_that_pauses_is_no_peers_fault(token: Secret) -> None:
    cluster = Cluster(token, fan_out=1)
    cluster.upstream.open(head(1, 0))
    for name in ("p0", "p1"):
        cluster.add(name)
    key = UpdateKey(1, UpdateKind.DELTA)
    bucket = b"".join(BucketWriter(digests=True).finish()[0])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(cluster.peers[name].store.read, key, "b00000", timeout_s=10.0) for name in ("p0", "p1")]
        time.sleep(3 * PATIENCE_S)
        cluster.upstream.put(key, "b00000", [bucket])
        assert [bytes(future.result(10)) for future in reading] == [bucket, bucket]
    assert cluster.peers["p1"].parent_name == "p0"
    assert cluster.relay.reads[key, "b00000"] == 1
    cluster.close()


def test_peers_go_on_through_a_restart_of_the_relay(cluster: Cluster) -> None:
    for name in ("p0", "p1"):
        cluster.add(name)
        cluster.follow(name)
    port = cluster.relay_server.port
    cluster.relay_server.close()
    cluster.publish(1)
    registry = PeerRegistry(1)
    cluster.relay_server = StoreServer(cluster.relay, port=port, token=cluster.token, read_only=True, on_peer=registry.on_peer)
    for name in ("p0", "p1"):
        tag = None
        while len((catalog := cluster.peers[name].store.catalog(after=tag, timeout_s=5.0)).entries) < 2:
            tag = catalog.tag
        cluster.follow(name)
    assert cluster.relay.reads[UpdateKey(1, UpdateKind.DELTA), "b00000"] >= 1
