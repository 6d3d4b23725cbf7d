"""Receiving a path of updates: decode every bucket in order, check every level, stage absolute values.

The levels: each run's checksum (a damaged bucket is fetched again), each run's fingerprint after decoding (which also finds out a
base that is not the sender's), the manifest's word on every bucket's index, its signature, and the fingerprint of each tensor.
Nothing is believed that one level up does not confirm, and nothing is returned before all of it agrees.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence

from common.transfer import fingerprint
from common.transfer.bits import BITS_DTYPES
from common.transfer.changes import all_positions, run_positions
from common.transfer.delta import decode_run
from common.transfer.encoder import fingerprint_run
from common.transfer.errors import (
    ChecksumError,
    FingerprintMismatchError,
    LayoutMismatchError,
    MalformedUpdateError,
    TruncatedError,
)
from common.transfer.fetch import BucketFetcher, FetchedBucket, Stopwatch
from common.transfer.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    BucketSummary,
    RunEntry,
    UpdateHead,
    parse_bucket_index,
    parse_manifest,
)
from common.transfer.shards import WeightLayout
from common.transfer.staging import StagedUpdate, WholeRuns
from common.transfer.store.protocol import Store
from common.transfer.target import WeightTarget

log = logging.getLogger(__name__)

MAX_FETCHES = 3
"""Attempts at a bucket whose bytes arrive damaged."""


def match_names(
    layout: WeightLayout,
    specs: Mapping[str, tuple[tuple[int, ...], str]],
    skip_sources: Collection[str],
    expected_missing: Collection[str],
) -> list[str | None]:
    """For each tensor of the layout a name under which the target has it; None for those in `skip_sources`.

    Raises:
        LayoutMismatchError: a tensor without counterpart on either side, or one of another shape or dtype.
    """
    names: list[str | None] = []
    for tensor in layout.tensors:
        mine = [name for name in (tensor.name, *tensor.tied) if name in specs]
        for name in mine:
            shape, dtype = specs[name]
            if (tuple(shape), dtype) != (tensor.shape, tensor.dtype):
                raise LayoutMismatchError(f"{name} is {tensor.dtype}{list(tensor.shape)} there and {dtype}{list(shape)} here")
        if not mine and tensor.name not in skip_sources:
            raise LayoutMismatchError(f"published {tensor.name} has no counterpart here; list it in skip_sources if that is right")
        names.append(mine[0] if mine else None)
    orphans = [name for name in specs if name not in layout.by_name and name not in expected_missing]
    if orphans:
        raise LayoutMismatchError(f"nobody publishes {orphans[:5]}; list them in expected_missing if that is right")
    return names


@dataclasses.dataclass
class Receiver:
    """Stages one path. `held` are the fingerprints, by run, of what the target holds now."""

    store: Store
    fetcher: BucketFetcher
    target: WeightTarget
    names: Sequence[str | None]
    held: Mapping[int, int]
    staged: StagedUpdate
    whole_runs: WholeRuns
    key: bytes | None
    timeout_s: float
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)

    def receive(self, heads: Sequence[UpdateHead]) -> StagedUpdate:
        """Stage the updates in order. Blocks; raises a TransferError and leaves the target as it was."""
        layout = self.staged.layout
        for head in heads:
            if (head.layout_digest, head.num_buckets, head.lineage) != (layout.digest, len(layout.buckets), self.staged.lineage):
                raise LayoutMismatchError(f"{head.key.path} has another layout or lineage than the update before it")
        fetched = self.fetcher.ahead(heads, layout)
        for head in heads:
            self._verify(head, [self._bucket(head, fetched) for _ in range(head.num_buckets)])
        self.staged.seconds = self.watch.seconds
        return self.staged

    def _bucket(self, head: UpdateHead, fetched: Iterator[FetchedBucket]) -> BucketSummary:
        with self.watch.part("fetch"):
            bucket = next(fetched)
        for attempt in range(1, MAX_FETCHES + 1):
            try:
                with self.watch.part("check"):
                    entries, summary = self._parse(bucket)
                break
            except (ChecksumError, MalformedUpdateError) as e:
                if attempt == MAX_FETCHES:
                    raise
                log.warning("%s: fetching bucket %d again: %s", head.key.path, bucket.bucket_idx, e)
            self.fetcher.take_back(bucket)
            with self.watch.part("fetch"):
                bucket = self.fetcher.fetch(head, bucket.bucket_idx, self.staged.layout)
        with self.watch.part("decode"):
            for entry in entries:
                self._run(head, entry, bucket.content[entry.offset : entry.offset + entry.length])
        self.fetcher.take_back(bucket)
        self.staged.wire_bytes += summary.object_bytes
        return summary

    def _parse(self, bucket: FetchedBucket) -> tuple[list[RunEntry], BucketSummary]:
        layout, content = self.staged.layout, bucket.content
        entries, summary = parse_bucket_index(content, layout.buckets[bucket.bucket_idx], layout)
        if summary.object_bytes != len(content):
            raise TruncatedError(f"bucket {bucket.bucket_idx}: {len(content)} of {summary.object_bytes} bytes came")
        for entry in entries:
            entry.check(content[entry.offset : entry.offset + entry.length])
        return entries, summary

    def _run(self, head: UpdateHead, entry: RunEntry, payload: memoryview) -> None:
        tensor_idx, run_idx = self.staged.layout.locate(entry.run)
        tensor, name = self.staged.layout.tensors[tensor_idx], self.names[tensor_idx]
        if name is None:
            return
        dtype = BITS_DTYPES[tensor.dtype]
        num_elements = self.staged.layout.run_bytes(entry.run) // dtype.itemsize
        decoded = decode_run(payload, num_elements, dtype)
        if decoded.values is not None:
            found = fingerprint_run(tensor, run_idx, decoded.values)
            self.staged.set_all(entry.run, self.whole_runs.keep(decoded.values))
        elif head.base_version is None:
            raise MalformedUpdateError(f"{head.key.path}: run {entry.run} of an anchor holds only changes")
        elif decoded.local is None:
            old = self.staged.all_bits(entry.run, lambda: self.target.read(name, all_positions(tensor, run_idx)))
            values = old + decoded.steps
            found = fingerprint_run(tensor, run_idx, values)
            self.staged.set_all(entry.run, self.whole_runs.keep(values))
        else:
            assert decoded.steps is not None
            positions = run_positions(tensor, run_idx, decoded.local)
            old = self.staged.current_bits(entry.run, decoded.local, lambda: self.target.read(name, positions))
            new = old + decoded.steps
            change = fingerprint.of_change(positions, old, new, tensor.row_elements)
            found = fingerprint.add(self._fingerprint(entry.run), change)
            self.staged.set_some(entry.run, decoded.local, new)
        if found != entry.fingerprint:
            raise FingerprintMismatchError(
                f"{head.key.path}: run {run_idx} of {tensor.name} decodes to fingerprint {found:016x}, the publisher's is"
                f" {entry.fingerprint:016x}: the weights held here are not the base it was made for"
            )
        self.staged.fingerprints[entry.run] = found

    def _fingerprint(self, run: int) -> int:
        """Of a run as it will be after what is staged so far."""
        return self.staged.fingerprints[run] if run in self.staged.fingerprints else self.held[run]

    def _verify(self, head: UpdateHead, found: Sequence[BucketSummary]) -> None:
        with self.watch.part("fetch"):
            payload = self.store.read(head.key, MANIFEST_NAME, length=MAX_MANIFEST_BYTES, timeout_s=self.timeout_s)
        with self.watch.part("check"):
            manifest = parse_manifest(payload, self.key)
            if manifest.head != head:
                raise MalformedUpdateError(f"{head.key.path}: the manifest is that of {manifest.head}")
            for bucket_idx, (mine, said) in enumerate(zip(found, manifest.buckets, strict=True)):
                if mine != said:
                    raise ChecksumError(f"{head.key.path}: bucket {bucket_idx} is {mine}, the manifest says {said}")
            for tensor_idx, expected in manifest.fingerprints.items():
                self._verify_tensor(head, tensor_idx, expected)
        self.staged.wire_bytes += len(payload)

    def _verify_tensor(self, head: UpdateHead, tensor_idx: int, expected: int) -> None:
        layout = self.staged.layout
        if not 0 <= tensor_idx < len(layout.tensors):
            raise MalformedUpdateError(f"{head.key.path}: the manifest names tensor {tensor_idx} of {len(layout.tensors)}")
        if self.names[tensor_idx] is None:
            return
        total = 0
        for run in range(layout.first_runs[tensor_idx], layout.first_runs[tensor_idx + 1]):
            if run not in self.staged.fingerprints and run not in self.held:
                raise MalformedUpdateError(f"{head.key.path}: run {run} of {layout.tensors[tensor_idx].name} never came")
            total = fingerprint.add(total, self._fingerprint(run))
        if total != expected:
            name = layout.tensors[tensor_idx].name
            raise FingerprintMismatchError(f"{head.key.path}: {name} adds up to {total:016x}, the manifest says {expected:016x}")
