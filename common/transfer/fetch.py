"""Fetching for a subscriber: checked buckets ahead of the decoder in reused memory, and leases that are renewed meanwhile.

A bucket of which every run is wanted comes in one read. Of any other the index comes first, then the wanted runs: neighbours in one
read, and runs between them too where that saves a request and adds little (see MAX_OVER_READ). Bytes that do not have the checksums
of their own index are fetched again.
"""

from __future__ import annotations

import bisect
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from common.transfer.errors import ChecksumError, MalformedUpdateError, TransferError, TruncatedError
from common.transfer.holding import Holding
from common.transfer.manifest import (
    BucketSummary,
    Manifest,
    RunEntry,
    UpdateHead,
    UpdateKey,
    bucket_name,
    max_bucket_bytes,
    max_index_bytes,
    parse_bucket_index,
)
from common.transfer.store.protocol import LEASE_TTL_S, Store

log = logging.getLogger(__name__)

BUCKETS_IN_FLIGHT = 3
"""Fetched or being fetched, the one under the decoder included: bounds the memory beyond the staged values."""
MAX_FETCHES = 3
"""Attempts at a bucket whose bytes arrive damaged."""
MAX_OVER_READ = 1 / 32
"""Bytes between wanted runs that may come along, as a share of the wanted ones: fewer requests for hardly more bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchedBucket:
    """The wanted runs of a bucket, checked against its index. Valid until its fetcher is told to take the bucket back."""

    head: UpdateHead
    bucket_idx: int
    entries: tuple[RunEntry, ...]
    """Of the wanted runs that the bucket holds."""
    num_missing: int
    """Wanted runs that it does not hold: in a delta, those that did not change."""
    summary: BucketSummary
    pieces: tuple[tuple[int, memoryview], ...]
    """(where it starts in the bucket object, bytes), in order."""
    fetched_bytes: int
    buffer: memoryview

    def payload(self, entry: RunEntry) -> memoryview:
        start, content = self.pieces[bisect.bisect_right(self.pieces, entry.offset, key=lambda piece: piece[0]) - 1]
        return content[entry.offset - start : entry.offset - start + entry.length]


class BucketFetcher:
    """Reads buckets over several connections at a time, into memory that is used again."""

    def __init__(self, store: Store, *, num_connections: int, timeout_s: float, name: str) -> None:
        self._store, self._timeout_s = store, timeout_s
        self._pool = concurrent.futures.ThreadPoolExecutor(num_connections, f"fetch-{name}")
        self._free: list[memoryview] = []

    def ahead(self, heads: Sequence[UpdateHead], holding: Holding) -> Iterator[FetchedBucket]:
        """All buckets that hold anything wanted, update by update. Each must be taken back before the next is asked for."""
        plan = [(head, bucket_idx) for head in heads for bucket_idx in holding.buckets]
        running: collections.deque[concurrent.futures.Future[FetchedBucket]] = collections.deque()
        try:
            for i in range(len(plan)):
                while len(running) < BUCKETS_IN_FLIGHT and i + len(running) < len(plan):
                    running.append(self._pool.submit(self.fetch, *plan[i + len(running)], holding))
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()

    def fetch(self, head: UpdateHead, bucket_idx: int, holding: Holding) -> FetchedBucket:
        """One bucket, waiting until it exists."""
        for attempt in range(1, MAX_FETCHES + 1):
            buffer = self._buffer(max_bucket_bytes(holding.layout.buckets[bucket_idx]))
            try:
                return self._fetch(head, bucket_idx, holding, buffer)
            except (ChecksumError, MalformedUpdateError) as e:
                if attempt == MAX_FETCHES:
                    raise
                log.warning("%s: fetching bucket %d again: %s", head.key.path, bucket_idx, e)
                self._free.append(buffer)
        raise AssertionError("unreachable")

    def fingerprints(self, manifest: Manifest, holding: Holding) -> dict[int, int]:
        """Of every run in the buckets that hold something wanted, from the indexes that a sealed update's manifest confirms."""
        layout = holding.layout

        def read(bucket_idx: int) -> list[RunEntry]:
            said = manifest.buckets[bucket_idx]
            into = np.empty(min(said.index_bytes, max_index_bytes(layout.buckets[bucket_idx])), np.uint8).data
            index = self._read(manifest.head.key, bucket_name(bucket_idx), 0, into)
            entries, summary = parse_bucket_index(index, layout.buckets[bucket_idx], layout)
            if summary != said:
                raise ChecksumError(f"{manifest.head.key.path}: bucket {bucket_idx} is {summary}, the manifest says {said}")
            return entries

        entries = self._pool.map(read, holding.buckets)
        return {entry.run: entry.fingerprint for of_bucket in entries for entry in of_bucket}

    def _fetch(self, head: UpdateHead, bucket_idx: int, holding: Holding, buffer: memoryview) -> FetchedBucket:
        bucket = holding.layout.buckets[bucket_idx]
        wanted = holding.wanted(bucket)
        whole = len(wanted) == len(bucket.runs)
        name = bucket_name(bucket_idx)
        if whole:
            front = self._store.read(head.key, name, into=buffer[: max_bucket_bytes(bucket)], timeout_s=self._timeout_s)
        else:
            front = self._read(head.key, name, 0, buffer[: max_index_bytes(bucket)])
        entries, summary = parse_bucket_index(front, bucket, holding.layout)
        if whole and summary.object_bytes != len(front):
            raise TruncatedError(f"bucket {bucket_idx}: {len(front)} of {summary.object_bytes} bytes came")
        kept = tuple(entry for entry in entries if entry.run in wanted)
        pieces, used = [(0, front)], len(front)
        for start, end in ranges_of(kept, have=len(front)):
            piece = self._read(head.key, name, start, buffer[used : used + end - start])
            if len(piece) != end - start:
                raise TruncatedError(f"bucket {bucket_idx}: {len(piece)} of {end - start} bytes from {start} on came")
            pieces.append((start, piece))
            used += len(piece)
        fetched = FetchedBucket(
            head=head,
            bucket_idx=bucket_idx,
            entries=kept,
            num_missing=len(wanted) - len(kept),
            summary=summary,
            pieces=tuple(pieces),
            fetched_bytes=used,
            buffer=buffer,
        )
        for entry in kept:
            entry.check(fetched.payload(entry))
        return fetched

    def _read(self, key: UpdateKey, name: str, start: int, into: memoryview) -> memoryview:
        return self._store.read(key, name, start=start, length=len(into), into=into, timeout_s=self._timeout_s)

    def _buffer(self, limit: int) -> memoryview:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = memoryview(b"")
        return buffer if len(buffer) >= limit else np.empty(limit, np.uint8).data  # untouched pages cost nothing

    def take_back(self, bucket: FetchedBucket) -> None:
        self._free.append(bucket.buffer)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def ranges_of(entries: Sequence[RunEntry], *, have: int) -> list[tuple[int, int]]:
    """Where to read so that these runs of a bucket are there: neighbours together, smallest gaps closed first.

    Args:
        have: bytes from the front of the bucket that came already. A run that begins there and ends later is read from its start.
    """
    ranges = [(entry.offset, entry.offset + entry.length) for entry in entries if entry.offset + entry.length > have]
    gaps = sorted((after[0] - before[1], i) for i, (before, after) in enumerate(itertools.pairwise(ranges)))
    allowed = int(MAX_OVER_READ * sum(end - start for start, end in ranges))
    closed = set()
    for gap, i in gaps:
        allowed -= gap
        if allowed < 0:
            break
        closed.add(i)
    merged: list[tuple[int, int]] = []
    for i, (start, end) in enumerate(ranges):
        if i - 1 in closed:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


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
                except (TransferError, OSError) as e:
                    log.warning("the lease on %s was not renewed: %s", key.path, e)
        for key in keys:
            with contextlib.suppress(TransferError, OSError):  # it ends by itself
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
