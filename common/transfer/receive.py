"""Receiving a path of updates: decode every bucket in order, check every level, stage absolute values.

The levels: each run's checksum (a damaged bucket is fetched again), each run's fingerprint after decoding (which also finds out a
base that is not the sender's), the manifest's word on every bucket's index, its signature, and the fingerprint of each tensor.
Nothing is believed that one level up does not confirm, and nothing is returned before all of it agrees.

A target that holds a part of the model fetches that part, so it checks less by fingerprint: runs that it holds wholly, and tensors
of which it holds every run. What it fetched is still what the publisher wrote: the manifest confirms the index of each bucket it
looked into, and the index the checksum of each run; with a key these are SHA-256 under the manifest's signature, which leaves
nothing out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from common.transfer import fingerprint
from common.transfer.bits import BITS_DTYPES
from common.transfer.changes import all_positions, run_positions
from common.transfer.delta import DecodedRun, decode_run
from common.transfer.encoder import fingerprint_run
from common.transfer.errors import (
    ChecksumError,
    FingerprintMismatchError,
    LayoutMismatchError,
    MalformedUpdateError,
)
from common.transfer.fetch import BucketFetcher, FetchedBucket, Stopwatch
from common.transfer.holding import Holding
from common.transfer.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    BucketSummary,
    RunEntry,
    UpdateHead,
    parse_manifest,
)
from common.transfer.staging import StagedUpdate, WholeRuns
from common.transfer.store.protocol import Store
from common.transfer.target import WeightTarget


@dataclasses.dataclass
class Receiver:
    """Stages one path. `held` are the fingerprints, by run, of what the target holds now."""

    store: Store
    fetcher: BucketFetcher
    target: WeightTarget
    holding: Holding
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
        fetched = self.fetcher.ahead(heads, self.holding)
        for head in heads:
            summaries: dict[int, BucketSummary] = {}
            for _ in self.holding.buckets:
                with self.watch.part("fetch"):
                    bucket = next(fetched)
                self._bucket(bucket)
                summaries[bucket.bucket_idx] = bucket.summary
                self.fetcher.take_back(bucket)
            self._verify(head, summaries)
        self.staged.seconds = self.watch.seconds
        return self.staged

    def _bucket(self, bucket: FetchedBucket) -> None:
        head = bucket.head
        if head.base_version is None and bucket.num_missing:
            raise MalformedUpdateError(f"{head.key.path}: bucket {bucket.bucket_idx} of an anchor lacks {bucket.num_missing} runs")
        with self.watch.part("decode"):
            for entry in bucket.entries:
                self._run(head, entry, bucket.payload(entry))
        self.staged.wire_bytes += bucket.fetched_bytes

    def _run(self, head: UpdateHead, entry: RunEntry, payload: memoryview) -> None:
        tensor_idx, run_idx = self.staged.layout.locate(entry.run)
        tensor, name = self.staged.layout.tensors[tensor_idx], self.holding.names[tensor_idx]
        assert name is not None, "only runs that are held are fetched"
        dtype = BITS_DTYPES[tensor.dtype]
        num_elements = self.staged.layout.run_bytes(entry.run) // dtype.itemsize
        decoded = decode_run(payload, num_elements, dtype)
        if decoded.values is None and head.base_version is None:
            raise MalformedUpdateError(f"{head.key.path}: run {entry.run} of an anchor holds only changes")
        if decoded.values is not None:
            found = fingerprint_run(tensor, run_idx, decoded.values)
            self.staged.set_all(entry.run, self.whole_runs.keep(decoded.values))
        elif not self.holding.is_whole(entry.run):
            self._change_part(entry.run, decoded, name)
            return
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
        if self.holding.is_whole(entry.run):
            self.staged.fingerprints[entry.run] = found

    def _change_part(self, run: int, decoded: DecodedRun, name: str) -> None:
        """Stage the changes to the elements of a run that are held; those beside them have no old values here."""
        inside = self.holding.inside(run)
        assert inside is not None
        assert decoded.steps is not None
        if decoded.local is None:
            local, steps = inside, decoded.steps[inside]
        else:
            kept = np.isin(decoded.local, inside, assume_unique=True)
            local, steps = decoded.local[kept], decoded.steps[kept]
        if len(local):
            tensor_idx, run_idx = self.staged.layout.locate(run)
            positions = run_positions(self.staged.layout.tensors[tensor_idx], run_idx, local)
            old = self.staged.current_bits(run, local, lambda: self.target.read(name, positions))
            self.staged.set_some(run, local, old + steps)

    def _fingerprint(self, run: int) -> int:
        """Of a run as it will be after what is staged so far."""
        return self.staged.fingerprints[run] if run in self.staged.fingerprints else self.held[run]

    def _verify(self, head: UpdateHead, found: Mapping[int, BucketSummary]) -> None:
        with self.watch.part("fetch"):
            payload = self.store.read(head.key, MANIFEST_NAME, length=MAX_MANIFEST_BYTES, timeout_s=self.timeout_s)
        with self.watch.part("check"):
            manifest = parse_manifest(payload, self.key)
            if manifest.head != head:
                raise MalformedUpdateError(f"{head.key.path}: the manifest is that of {manifest.head}")
            for bucket_idx, mine in found.items():
                if mine != manifest.buckets[bucket_idx]:
                    said = manifest.buckets[bucket_idx]
                    raise ChecksumError(f"{head.key.path}: bucket {bucket_idx} is {mine}, the manifest says {said}")
            for tensor_idx, expected in manifest.fingerprints.items():
                self._verify_tensor(head, tensor_idx, expected)
        self.staged.wire_bytes += len(payload)

    def _verify_tensor(self, head: UpdateHead, tensor_idx: int, expected: int) -> None:
        layout = self.staged.layout
        if not 0 <= tensor_idx < len(layout.tensors):
            raise MalformedUpdateError(f"{head.key.path}: the manifest names tensor {tensor_idx} of {len(layout.tensors)}")
        if not self.holding.holds_tensor(tensor_idx):
            return
        total = 0
        for run in range(layout.first_runs[tensor_idx], layout.first_runs[tensor_idx + 1]):
            if run not in self.staged.fingerprints and run not in self.held:
                raise MalformedUpdateError(f"{head.key.path}: run {run} of {layout.tensors[tensor_idx].name} never came")
            total = fingerprint.add(total, self._fingerprint(run))
        if total != expected:
            name = layout.tensors[tensor_idx].name
            raise FingerprintMismatchError(f"{head.key.path}: {name} adds up to {total:016x}, the manifest says {expected:016x}")
