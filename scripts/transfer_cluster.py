"""The cluster part of `bench_transfer`: one learner, N replicas behind one slow link, with and without relay and peers.

Every replica is a process of its own with a whole model and a full Subscriber; learner and relay are processes too. Learner on one
side of a shaped link (see scripts/link.py), all others on the other side, joined by loopback. Seconds run from the call of publish
to the commit of the last replica; bytes are those the link's device counted on the replicas' side, headers and all. A row's CPU
seconds say whether the link or the machine was the limit: N replicas share two cores here, in a cluster they do not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

from common import check_installation
from common.transfer.cache import ObjectCache
from common.transfer.cost_model import Cluster as ModelledCluster
from common.transfer.cost_model import Prediction, Rates, Update, predict
from common.transfer.peer_store import Peer
from common.transfer.peers import PeerRegistry
from common.transfer.publisher import Publisher
from common.transfer.relay import RelayStore
from common.transfer.secrets import Secret
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from scripts import link, transfer_data
from scripts.transfer_sync import LOOPBACK_GBIT_S, TIMEOUT_S, checksum_of, follow, received_bytes

DIRECT, RELAY, PEERS = "direct", "relay", "relay and peers"
FAN_OUT = 2
LINK_GBIT_S, RTT_MS = 0.2, 20.0
UNCHANGED = (0.99, 0.5)
REPEATS = 3
"""Syncs of a kind; the one of median seconds is shown."""
NUM_CORES = len(os.sched_getaffinity(0))
CROWD = 4 * NUM_CORES
"""Replicas that load all cores, for calibration."""
CACHE_BYTES = 2_000_000_000
Row = dict[str, object]
Shapes = Mapping[str, tuple[int, ...]]


def shapes_150_mb() -> dict[str, tuple[int, ...]]:
    return transfer_data.qwen3_shapes(num_layers=3, vocab_size=27_000)


def measure(*, quick: bool) -> list[Row]:
    """All rows, each with what the cost model says of it. None where links cannot be shaped: there is no slow link then."""
    if not link.available():
        return []
    shapes = shapes_150_mb()
    alone, crowd = calibrate(shapes, 1), calibrate(shapes, CROWD)
    cores = _cores(crowd[min(UNCHANGED)])
    one_receiver: dict[float, float] = {}
    rows: list[Row] = []
    for num_replicas in (1, 4) if quick else (1, 4, 16):
        for how in (DIRECT, RELAY, PEERS):
            for row in _rows(shapes, num_replicas, how):
                unchanged, link_bytes = float(str(row["unchanged"])), float(str(row["bytes_on_link"]))
                row["bytes_over_one_receiver"] = link_bytes / one_receiver.setdefault(unchanged, link_bytes)
                predicted = _predict(row, alone[unchanged], alone[unchanged] if num_replicas == 1 else crowd[unchanged], cores)
                row |= {"predicted_s": predicted.seconds, "predicted_bytes": predicted.slow_link_bytes, "limit": predicted.limit}
                rows.append(row)
                print("  sync", row, flush=True)
    return rows


def _rows(shapes: Shapes, num_replicas: int, how: str) -> list[Row]:
    cluster = Cluster(shapes, num_replicas, how, link_gbit_s=LINK_GBIT_S, rtt_ms=RTT_MS)
    try:
        fixed: Row = {"method": "ours", "link_gbit_s": LINK_GBIT_S, "rtt_ms": RTT_MS, "shaped": "kernel"}
        rows = []
        for unchanged in UNCHANGED:
            runs = sorted((cluster.sync(unchanged) for _ in range(REPEATS)), key=lambda row: float(str(row["seconds"])))
            spread = {"repeats": REPEATS, "seconds_min": runs[0]["seconds"], "seconds_max": runs[-1]["seconds"]}
            rows.append(fixed | runs[REPEATS // 2] | spread)
        return rows
    finally:
        cluster.close()


def calibrate(shapes: Shapes, num_replicas: int) -> dict[float, Row]:
    """Replicas on plain loopback: what they and the learner take for an update of each density. The better of two."""
    cluster = Cluster(shapes, num_replicas, DIRECT, link_gbit_s=None, rtt_ms=0.0)
    try:
        runs = [cluster.sync(unchanged) for unchanged in UNCHANGED * 2]
    finally:
        cluster.close()
    best: dict[float, Row] = {}
    for row in sorted(runs, key=lambda row: -float(str(row["cpu_seconds"]))):
        best[float(str(row["unchanged"]))] = row
    return best


def _cores(calibration: Row) -> float:
    """Cores that the replicas really had: other tenants of the machine take their share."""
    cpu_s = calibration["cpu_split"]
    assert isinstance(cpu_s, dict)
    busy_s = float(str(calibration["seconds"])) - float(str(calibration["encode_s"]))
    return min(float(NUM_CORES), max(1.0, cpu_s["receivers"] / busy_s))


def _predict(row: Row, alone: Row, calibration: Row, cores: float) -> Prediction:
    """What the cost model says of a row, given the machine's rates and nothing of the row's own figures.

    Args:
        alone: calibration with one replica, for the learner: it encodes while replicas still wait.
        calibration: for replicas, alone or in a crowd, where each takes more of a core for the same update.
    """
    num_parameters = sum(math.prod(shape) for shape in shapes_150_mb().values())
    update = Update(num_parameters=num_parameters, density=1 - float(str(row["unchanged"])))
    encoding, decoding, dense_gb = alone["cpu_split"], calibration["cpu_split"], update.dense_bytes / 1e9
    assert isinstance(encoding, dict)
    assert isinstance(decoding, dict)
    num_calibrated = int(str(calibration["receivers"]))
    rates = Rates(encode_s=encoding["learner"] / dense_gb, decode_s=decoding["receivers"] / num_calibrated / dense_gb)
    cluster = ModelledCluster(
        encode_cores=max(1.0, encoding["learner"] / float(str(alone["encode_s"]))),
        num_replicas=int(str(row["receivers"])),
        slow_gbit_s=LINK_GBIT_S,
        slow_rtt_s=RTT_MS / 1000,
        host_gbit_s=LOOPBACK_GBIT_S,
        relay=row["how"] != DIRECT,
        fan_out=FAN_OUT if row["how"] == PEERS else None,
        shared_cores=cores,
    )
    return predict(update, cluster, rates)


@dataclasses.dataclass
class _Process:
    """A process of the cluster and the pipe that leads to it."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def ask(self, *question: object) -> object:
        self.pipe.send(question)
        return self.pipe.recv()


class Cluster:
    """Learner, relay (unless replicas read directly) and replicas, all at version 0. Close it."""

    def __init__(self, shapes: Shapes, num_replicas: int, how: str, *, link_gbit_s: float | None, rtt_ms: float) -> None:
        """
        Args:
            link_gbit_s: rate of the link between learner and replicas; None: plain loopback.
        """
        self._how, self._version = how, 0
        self._link = None if link_gbit_s is None else link.Link(link_gbit_s, rtt_ms)
        near = None if self._link is None else self._link.receiver_namespace
        far = None if self._link is None else self._link.sender_namespace
        host = "127.0.0.1" if self._link is None else link.SENDER_ADDRESS
        token = Secret(os.urandom(16).hex().encode(), "made for this run")
        os.environ["PYTHONSAFEPATH"] = "1"
        self._processes: list[_Process] = []
        try:
            self._learner = self._start(_learner, far, token, host, shapes)
            url = self._learner.pipe.recv()
            self._relay = None
            if how != DIRECT:
                self._relay = self._start(_relay, near, token, url)
                url = self._relay.pipe.recv()
            self._replicas = [self._start(_replica, near, token, url, shapes, f"r{i}", how) for i in range(num_replicas)]
            for replica in self._replicas:
                assert replica.pipe.recv() == "ready"
        except BaseException:
            self.close()
            raise

    def _start(self, role: object, namespace: str | None, token: Secret, *arguments: object) -> _Process:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_run, args=(role, theirs, namespace, token, *arguments))
        process.start()
        theirs.close()
        self._processes.append(_Process(process, ours))
        return self._processes[-1]

    def sync(self, unchanged: float) -> Row:
        """One learner step to a new version, to the commit of the last replica."""
        self._version += 1
        self._learner.ask("step", unchanged, self._version)
        started_bytes = self._replicas[0].ask("bytes")
        before = self._cpu_s()
        for replica in self._replicas:  # from here to its commit a replica answers nothing
            assert replica.ask("wait") == "waiting"
        sent = self._learner.ask("publish")
        arrived = [replica.pipe.recv() for replica in self._replicas]
        cpu_s = {name: after - before[name] for name, after in self._cpu_s().items()}
        link_bytes = self._replicas[0].ask("bytes") - started_bytes  # type: ignore[operator]
        learned = self._learner.ask("checksum")
        assert all(replica.ask("checksum") == learned for replica in self._replicas), "a replica's weights are not the learner's"
        seconds = sorted(committed_at_s - sent["started_at_s"] for committed_at_s in arrived)  # type: ignore[index]
        return {
            "receivers": len(self._replicas),
            "how": self._how,
            "unchanged": unchanged,
            "seconds": seconds[-1],
            "seconds_first": seconds[0],
            "bytes_on_link": link_bytes,
            "cpu_seconds": sum(cpu_s.values()),
            "cpu_split": cpu_s,
            "encode_s": sent["encode_s"],  # type: ignore[index]
            "wire_bytes": sent["wire_bytes"],  # type: ignore[index]
        }

    def _cpu_s(self) -> dict[str, float]:
        found = {"learner": float(str(self._learner.ask("cpu")))}
        if self._relay is not None:
            found["relay"] = float(str(self._relay.ask("cpu")))
        return found | {"receivers": sum(float(str(replica.ask("cpu"))) for replica in self._replicas)}

    def close(self) -> None:
        for each in reversed(self._processes):
            each.pipe.close()
        for each in self._processes:
            each.process.join(30)
            if each.process.is_alive():
                each.process.terminate()
                each.process.join()
        if self._link is not None:
            self._link.close()


def _run(role: object, pipe: Connection, namespace: str | None, token: Secret, *arguments: object) -> None:
    check_installation(__file__)
    assert callable(role)
    if namespace is not None:
        link.enter(namespace)
    with contextlib.suppress(EOFError, BrokenPipeError):  # the cluster is closed
        role(pipe, token, *arguments)
    os._exit(0)  # a thread that still waits for news must not hold this up


def _questions(pipe: Connection) -> Iterator[tuple]:
    """What the cluster asks; how much CPU time this process took is answered here."""
    while True:
        question = pipe.recv()
        if question == ("cpu",):
            pipe.send(time.process_time())
        else:
            yield question


def _learner(pipe: Connection, token: Secret, host: str, shapes: Shapes) -> None:
    weights = transfer_data.model_weights(dict(shapes))
    store = MemoryStore()
    server = StoreServer(store, host=host, token=token)
    publisher = Publisher(store, anchor_interval=1 << 40, link_gbit_s=LINK_GBIT_S)
    publisher.publish(0, weights).result()
    pipe.send(server.url)
    version = 0
    for command, *values in _questions(pipe):
        if command == "step":
            unchanged, version = values
            weights = transfer_data.step_model(weights, 1 - unchanged, version)
            pipe.send("stepped")
        elif command == "publish":
            started_at_s = time.monotonic()
            report = publisher.publish(version, weights).result()
            pipe.send({"started_at_s": started_at_s, "encode_s": report.encode_s, "wire_bytes": report.wire_bytes})
        else:
            pipe.send(checksum_of(weights))


def _relay(pipe: Connection, token: Secret, learner_url: str) -> None:
    upstream = HttpStore(learner_url, token=token, timeout_s=TIMEOUT_S)
    relay = RelayStore(upstream, ObjectCache(MemoryStore(), max_bytes=CACHE_BYTES))
    server = StoreServer(relay, token=token, read_only=True, on_peer=PeerRegistry(FAN_OUT).on_peer)
    pipe.send(server.url)
    for _ in _questions(pipe):
        raise AssertionError("a relay is only asked for its CPU seconds")


def _replica(pipe: Connection, token: Secret, url: str, shapes: Shapes, name: str, how: str) -> None:
    arrays = transfer_data.model_weights(dict(shapes))
    store: Store = HttpStore(url, token=token, timeout_s=TIMEOUT_S)
    if how == PEERS:
        assert isinstance(store, HttpStore)
        store = Peer(store, ObjectCache(MemoryStore(), max_bytes=CACHE_BYTES), name=name, token=token).store
    subscriber = Subscriber(store, NumpyTarget(arrays), receiver_id=name, timeout_s=TIMEOUT_S)
    assert subscriber.adopt() == 0
    pipe.send("ready")
    for (command,) in _questions(pipe):
        if command == "wait":
            pipe.send("waiting")
            follow(subscriber)
            pipe.send(time.monotonic())
        else:
            pipe.send(received_bytes() if command == "bytes" else checksum_of(arrays))
