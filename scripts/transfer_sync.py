"""The sync part of `bench_transfer`: one learner process, one replica process, a link between them, and the clock of the machine.

Both start from the same weights (the replica adopts version 0). Then for every row the learner steps to a new version, publishes
it by one method, and the row's seconds run from the call of publish, with the new weights in host memory, to the replica's commit.
"ours" and "full" go through publisher, HTTP store and subscriber with every check on; "full" sends every tensor raw. The other
baselines go through the same store and the same overlap of fetching and decoding, with a checksum per bucket and nothing else.
"""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import xxhash

from common import check_installation
from common.transfer.bits import flat_bits
from common.transfer.manifest import UpdateHead, UpdateKey, UpdateKind, bucket_name
from common.transfer.publisher import Publisher
from common.transfer.secrets import Secret
from common.transfer.shards import BUCKET_BYTES
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Arrived, Store
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from scripts import link, transfer_baselines, transfer_data
from scripts.transfer_data import Weights

LOOPBACK_GBIT_S = 30.0
"""What a loopback connection of this code carries while both ends also work; told to the publisher, which then weighs time."""
TIMEOUT_S = 300.0
OURS, FULL = "ours", "full"
SLOWEST_GBIT_S = 0.2
"""A link on which the wire alone decides: one run of each method there."""
REPEATS = 3
"""Elsewhere first touch of memory and other tenants of the machine move single runs by up to a half."""
Row = dict[str, object]


def measure(*, quick: bool) -> list[Row]:
    """All rows: every link, method and density that makes sense there."""
    shapes = transfer_data.qwen3_shapes(num_layers=3, vocab_size=15_000) if quick else transfer_data.qwen3_shapes(28, 151_936)
    shaped = link.available()
    links: list[tuple[float | None, float]] = (
        [(1.0, 20.0), (None, 0.0)] if quick else [(SLOWEST_GBIT_S, 20.0), (1.0, 20.0), (None, 0.0)]
    )
    rows = []
    for rate_gbit_s, rtt_ms in links:
        with_link = rate_gbit_s is not None and shaped
        pair = _Pair(shapes, rate_gbit_s, rtt_ms, shaped=with_link)
        try:
            how = "none" if rate_gbit_s is None else "kernel" if with_link else "paced by sender, no delay"
            fixed = {"link_gbit_s": rate_gbit_s, "rtt_ms": rtt_ms if with_link else 0.0, "receivers": 1, "shaped": how}
            for row in _medians(pair, _plan(rate_gbit_s), 1 if rate_gbit_s == SLOWEST_GBIT_S else REPEATS):
                rows.append(fixed | row)
                print("  sync", rows[-1], flush=True)
        finally:
            pair.close()
    return rows


def _medians(pair: _Pair, plan: list[tuple[str, float]], repeats: int) -> list[Row]:
    """The plan run `repeats` times, every other time backwards; of each entry the run of median seconds, and the range."""
    runs: dict[tuple[str, float], list[Row]] = {entry: [] for entry in plan}
    for repeat in range(repeats):
        for entry in plan[::-1] if repeat % 2 else plan:
            runs[entry].append(pair.sync(*entry))
    rows = []
    for of_entry in runs.values():
        of_entry.sort(key=lambda row: float(str(row["seconds"])))
        spread = {"repeats": repeats, "seconds_min": of_entry[0]["seconds"], "seconds_max": of_entry[-1]["seconds"]}
        rows.append(of_entry[repeats // 2] | spread)
    return rows


def _plan(rate_gbit_s: float | None) -> list[tuple[str, float]]:
    """Ours at every density; the others where they are compared, since full takes as long at any density."""
    plan = [(OURS, unchanged) for unchanged in (0.99, 0.97, 0.9, 0.5)]
    plan += [("index_value", 0.99), ("xor_zstd", 0.99), (FULL, 0.99)]
    return plan + ([] if rate_gbit_s == SLOWEST_GBIT_S else [("xor_zstd", 0.5)])


class _Pair:
    """The two processes and the link between them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rate_gbit_s: float | None, rtt_ms: float, *, shaped: bool) -> None:
        self._link = link.Link(rate_gbit_s, rtt_ms) if shaped and rate_gbit_s is not None else None
        token = Secret(os.urandom(16).hex().encode(), "made for this run")
        os.environ["PYTHONSAFEPATH"] = "1"
        context = multiprocessing.get_context("spawn")
        self._learner, learner_end = context.Pipe()
        self._replica, replica_end = context.Pipe()
        pace = None if shaped else rate_gbit_s
        host = link.SENDER_ADDRESS if shaped else "127.0.0.1"
        spaces = (self._link.sender_namespace, self._link.receiver_namespace) if self._link else (None, None)
        self._processes = [
            context.Process(target=_learner, args=(learner_end, spaces[0], host, token, shapes, rate_gbit_s, pace)),
            context.Process(target=_replica, args=(replica_end, spaces[1], token, shapes)),
        ]
        for process in self._processes:
            process.start()
        learner_end.close()
        replica_end.close()
        self._replica.send(self._learner.recv())
        assert self._replica.recv() == "ready"

    def sync(self, method: str, unchanged: float) -> Row:
        self._learner.send(("step", unchanged))
        self._replica.send((method, self._learner.recv()))
        assert self._replica.recv() == "waiting"
        self._learner.send(("publish", method))
        arrived = self._replica.recv()
        sent = self._learner.recv()
        self._learner.send("committed")
        after = self._learner.recv()
        assert arrived["checksum"] == after["checksum"], f"{method}: the replica's weights are not the learner's"
        return {
            "unchanged": unchanged,
            "method": method,
            "seconds": arrived["committed_at_s"] - sent["started_at_s"],
            "cpu_seconds": after["cpu_s"] + arrived["cpu_s"],
            "cpu_split": {"learner": after["cpu_s"], "replica": arrived["cpu_s"]},
            "bytes_on_link": arrived["bytes"],
            "split": {"learner_encode_s": sent["encode_s"]} | arrived["split"],
        }

    def close(self) -> None:
        for pipe in (self._learner, self._replica):
            pipe.close()
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.terminate()
        if self._link is not None:
            self._link.close()


class _PacedStore(MemoryStore):
    """Where links cannot be shaped: hands bytes out no faster than a rate, one reader at a time."""

    gbit_s: float | None = None

    def read(
        self,
        key: UpdateKey,
        name: str,
        *,
        timeout_s: float,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        arrived: Arrived | None = None,
    ) -> memoryview:
        content = super().read(key, name, timeout_s=timeout_s, start=start, length=length, into=into)
        if self.gbit_s is not None:
            with self._news:
                time.sleep(len(content) * 8e-9 / self.gbit_s)
        return content


def checksum_of(weights: Weights) -> int:
    digest = xxhash.xxh3_64()
    for array in weights.values():
        digest.update(flat_bits(array).data)
    return digest.intdigest()


def _pieces(weights: Weights) -> Iterator[list[str]]:
    """Names of tensors that together are about a bucket."""
    names: list[str] = []
    size = 0
    for name, array in weights.items():
        if names and size + array.nbytes > BUCKET_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += array.nbytes
    yield names


def _learner(
    pipe: Connection,
    namespace: str | None,
    host: str,
    token: Secret,
    shapes: dict[str, tuple[int, ...]],
    rate_gbit_s: float | None,
    pace_gbit_s: float | None,
) -> None:
    check_installation(__file__)
    if namespace is not None:
        link.enter(namespace)
    weights = transfer_data.model_weights(shapes)
    stores = {method: _PacedStore() for method in (OURS, *transfer_baselines.METHODS)}
    servers = {method: StoreServer(store, host=host, token=token) for method, store in stores.items()}
    ours = Publisher(stores[OURS], anchor_interval=1 << 40, link_gbit_s=rate_gbit_s or LOOPBACK_GBIT_S)
    full = Publisher(stores[FULL], deltas=False, link_gbit_s=LOOPBACK_GBIT_S)
    ours.publish(0, weights).result()
    for store in stores.values():
        store.gbit_s = pace_gbit_s
    pipe.send({method: server.url for method, server in servers.items()})
    version, new = 0, weights
    while True:
        try:
            command, argument = pipe.recv()
        except EOFError:
            return
        if command == "step":
            version += 1
            new = transfer_data.step_model(weights, 1 - argument, version)
            pipe.send(version)
            continue
        started_at_s, started_cpu_s = time.monotonic(), time.process_time()
        if argument in (OURS, FULL):
            encode_s = (ours if argument == OURS else full).publish(version, new).result().encode_s
        else:
            encode_s = _publish_baseline(stores[argument], argument, version, weights, new)
        pipe.send({"started_at_s": started_at_s, "encode_s": encode_s})
        assert pipe.recv() == "committed"
        pipe.send({"cpu_s": time.process_time() - started_cpu_s, "checksum": checksum_of(new)})
        if argument == OURS:
            weights = new
        else:
            stores[argument].remove(UpdateKey(version, UpdateKind.ANCHOR if argument == FULL else UpdateKind.DELTA), force=True)


def _publish_baseline(store: Store, method: str, version: int, old: Weights, new: Weights) -> float:
    """Encode and put one object per bucket, two at a time, as the publisher does. Returns the seconds."""
    started_s = time.perf_counter()
    pieces = list(_pieces(new))
    lineage = method.replace("_", "")
    head = UpdateHead(
        version=version,
        base_version=version - 1,
        lineage=lineage,
        layout_digest="none",
        num_buckets=len(pieces),
        dense_bytes=sum(array.nbytes for array in new.values()),
    )
    store.open(head)

    def put(bucket_idx: int) -> None:
        parts = [transfer_baselines.encode(method, flat_bits(old[name]), flat_bits(new[name])) for name in pieces[bucket_idx]]
        bodies = [b"".join(tensor_parts) for tensor_parts in parts]
        payload = b"".join(len(body).to_bytes(8, "little") + body for body in bodies)
        store.put(head.key, bucket_name(bucket_idx), [xxhash.xxh3_64_digest(payload), payload])

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(put, range(len(pieces))))
    store.seal(head.key, b"{}")
    return time.perf_counter() - started_s


def _replica(pipe: Connection, namespace: str | None, token: Secret, shapes: dict[str, tuple[int, ...]]) -> None:
    check_installation(__file__)
    if namespace is not None:
        link.enter(namespace)
    arrays = transfer_data.model_weights(shapes)
    stores = {method: HttpStore(url, token=token, timeout_s=TIMEOUT_S) for method, url in pipe.recv().items()}
    target = NumpyTarget(arrays)
    ours = Subscriber(stores[OURS], target, receiver_id="ours", timeout_s=TIMEOUT_S)
    full = Subscriber(stores[FULL], target, receiver_id="full", timeout_s=TIMEOUT_S)
    assert ours.adopt() == 0
    pipe.send("ready")
    while True:
        try:
            method, version = pipe.recv()
        except EOFError:
            return
        before = None if method == OURS else {name: array.copy() for name, array in arrays.items()}
        started_bytes, started_cpu_s = received_bytes(), time.process_time()
        pipe.send("waiting")
        if method in (OURS, FULL):
            split, wire_bytes = follow(ours if method == OURS else full)
        else:
            split, wire_bytes = _follow_baseline(stores[method], method, version, arrays)
        committed_at_s, cpu_s = time.monotonic(), time.process_time() - started_cpu_s
        received = received_bytes() - started_bytes
        pipe.send(
            {
                "committed_at_s": committed_at_s,
                "cpu_s": cpu_s,
                "split": split,
                "bytes": received if namespace is not None else wire_bytes,
                "checksum": checksum_of(arrays),
            }
        )
        for name, array in (before or {}).items():  # only ours goes on from what it brought
            np.copyto(arrays[name], array)


def follow(subscriber: Subscriber) -> tuple[dict[str, float], int]:
    """Wait for the next version, stage and commit it. Returns seconds by part and bytes of the update."""
    assert subscriber.poll(TIMEOUT_S) is not None
    started_s = time.perf_counter()
    staged = subscriber.stage()
    assert staged is not None
    staged_s = time.perf_counter()
    subscriber.commit(staged)
    split = {f"replica_{name}_s": seconds for name, seconds in staged.seconds.items()}
    return split | {"replica_stage_s": staged_s - started_s, "replica_commit_s": time.perf_counter() - staged_s}, staged.wire_bytes


def _follow_baseline(store: Store, method: str, version: int, arrays: Weights) -> tuple[dict[str, float], int]:
    """The same for a baseline: fetch three buckets ahead over two connections, decode all, then write."""
    key = UpdateKey(version, UpdateKind.DELTA)
    while store.catalog().find(key) is None:
        store.catalog(after=store.catalog().tag, timeout_s=TIMEOUT_S)
    pieces = list(_pieces(arrays))
    staged: list[tuple[str, transfer_baselines.Decoded]] = []
    wire_bytes = 0

    def fetch(bucket_idx: int) -> memoryview:
        return store.read(key, bucket_name(bucket_idx), timeout_s=TIMEOUT_S)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = collections.deque(pool.submit(fetch, i) for i in range(min(3, len(pieces))))
        for bucket_idx, names in enumerate(pieces):
            content = running.popleft().result()
            if bucket_idx + 3 < len(pieces):
                running.append(pool.submit(fetch, bucket_idx + 3))
            wire_bytes += len(content)
            assert xxhash.xxh3_64_digest(content[8:]) == content[:8]
            content = content[8:]
            for name in names:
                length = int.from_bytes(content[:8], "little")
                decoded = transfer_baselines.decode(method, content[8 : 8 + length], flat_bits(arrays[name]))
                staged += [(name, piece) for piece in decoded]
                content = content[8 + length :]
    staged_s = time.perf_counter()
    for name, piece in staged:
        transfer_baselines.write(piece, flat_bits(arrays[name]))
    return {"replica_commit_s": time.perf_counter() - staged_s}, wire_bytes


def received_bytes() -> int:
    """Bytes that came over the shaped link, headers and all; 0 where there is none."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "link0":
            return int(counters.split()[0])
    return 0
