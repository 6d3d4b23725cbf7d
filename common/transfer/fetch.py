"""Fetching for a subscriber: buckets ahead of the decoder in reused memory, and leases that are renewed meanwhile."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from common.transfer.errors import TransferError
from common.transfer.manifest import UpdateHead, UpdateKey, bucket_name, max_bucket_bytes
from common.transfer.shards import WeightLayout
from common.transfer.store.protocol import LEASE_TTL_S, Store

log = logging.getLogger(__name__)

BUCKETS_IN_FLIGHT = 3
"""Fetched or being fetched, the one under the decoder included: bounds the memory beyond the staged values."""


@dataclasses.dataclass(frozen=True)
class FetchedBucket:
    """A bucket object as it came. `content` is valid until its fetcher is told to take the bucket back."""

    head: UpdateHead
    bucket_idx: int
    content: memoryview
    buffer: memoryview


class BucketFetcher:
    """Reads whole buckets over several connections at a time, into memory that is used again."""

    def __init__(self, store: Store, *, num_connections: int, timeout_s: float, name: str) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(num_connections, f"fetch-{name}")
        self._free: list[memoryview] = []

    def ahead(self, heads: Sequence[UpdateHead], layout: WeightLayout) -> Iterator[FetchedBucket]:
        """All buckets of the updates in order. Each must be taken back before the next is asked for."""
        plan = [(head, bucket_idx) for head in heads for bucket_idx in range(head.num_buckets)]
        running: collections.deque[concurrent.futures.Future[FetchedBucket]] = collections.deque()
        try:
            for i in range(len(plan)):
                while len(running) < BUCKETS_IN_FLIGHT and i + len(running) < len(plan):
                    running.append(self._pool.submit(self.fetch, *plan[i + len(running)], layout))
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

    def fetch(self, head: UpdateHead, bucket_idx: int, layout: WeightLayout) -> FetchedBucket:
        """One bucket, waiting until it exists."""
        limit = max_bucket_bytes(layout.buckets[bucket_idx])
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = memoryview(b"")
        if len(buffer) < limit:
            buffer = np.empty(limit, np.uint8).data  # untouched pages cost nothing
        content = self._store.read(head.key, bucket_name(bucket_idx), into=buffer[:limit], timeout_s=self._timeout_s)
        return FetchedBucket(head, bucket_idx, content, buffer)

    def take_back(self, bucket: FetchedBucket) -> None:
        self._free.append(bucket.buffer)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def leases(store: Store, keys: Sequence[UpdateKey], holder: str) -> Iterator[None]:
    """Keep updates from being removed while the body runs. Raises VersionGoneError at once if one is gone already.

    They are given up in the background: the body's result need not wait for another round trip. A renewal that fails is logged
    and tried again: should the update really be gone, reading it will say so.
    """
    done = threading.Event()

    def keep() -> None:
        while not done.wait(LEASE_TTL_S / 3):
            for key in keys:
                try:
                    store.lease(key, holder)
                except TransferError as e:
                    log.warning("the lease on %s was not renewed: %s", key.path, e)
        for key in keys:
            with contextlib.suppress(TransferError):  # it ends by itself
                store.release(key, holder)

    keeper = threading.Thread(target=keep, name=f"leases-{holder}", daemon=True)
    keeper.start()
    try:
        for key in keys:
            store.lease(key, holder)
        yield
    finally:
        done.set()


class Stopwatch:
    """Adds up where the time goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s
