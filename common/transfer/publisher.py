"""Publisher: the learner's end. Takes each new version, encodes what changed since the last one, and puts it into a store.

`publish` hands the arrays over and returns; comparing, encoding and sending happen bucket by bucket in the background, at most
three buckets at a time. Besides what the store retains it holds one copy of the last published version, against which the next is
compared. Every `anchor_interval` versions an anchor (all values) follows the delta, and what nobody needs any more is pruned. Where
the learner is several processes each has a Publisher and publishes its own boxes; see writers.py.

Invariant: versions are sealed in order and each delta's base is the version sealed before it. What a receiver holds is known from
its own confirmations only. After a failure the update is withdrawn with the reason, and the next version starts with an anchor. So
does a version whose arrays are sharded otherwise than the last one's.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import time
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import UInt64

from common.transfer import fingerprint
from common.transfer.bits import BITS_DTYPES, DTYPES
from common.transfer.changes import copy_run
from common.transfer.encoder import EncodedRun, Place, encode_run, encode_whole_run
from common.transfer.manifest import (
    LAYOUT_NAME,
    BucketSummary,
    BucketWriter,
    Manifest,
    UpdateHead,
    UpdateKey,
    UpdateKind,
    bucket_name,
)
from common.transfer.ownership import Owners
from common.transfer.paths import prunable
from common.transfer.publication import Publication, PublishReport
from common.transfer.shards import Bucket, WeightLayout, build_layout
from common.transfer.source import Part, ShardedTensor, Source, SourceBits, parts_of
from common.transfer.store.protocol import Store
from common.transfer.writers import Writers, newest_anchor

log = logging.getLogger(__name__)

BUCKETS_IN_FLIGHT = 3
"""Encoded and not yet in the store: bounds the memory beyond the snapshot."""


class Publisher:
    """See the module. Use from one thread; one publisher a store at a time, or one for each of `writers`."""

    def __init__(
        self,
        store: Store,
        *,
        tied: Mapping[str, str] | None = None,
        anchor_interval: int = 16,
        link_gbit_s: float | None = None,
        key: bytes | None = None,
        deltas: bool = True,
        num_threads: int = 2,
        lay_out: Callable[..., WeightLayout] = build_layout,
        writers: Writers | None = None,
    ) -> None:
        """
        Args:
            tied: checkpoint name -> the published name whose values it shares. Arrays that share memory are found to be tied.
            anchor_interval: versions from one anchor to the next.
            link_gbit_s: rate of the slowest link to a receiver, if known: encodings are then chosen by time instead of size.
            key: signs manifests and adds SHA-256 digests to runs, for stores or relays that are not trusted.
            deltas: False publishes every version whole and keeps no copy (a baseline to measure against).
            writers: which process this is, where several publish together; all other arguments are then the same on all of them.
        """
        if anchor_interval < 1:
            raise ValueError(f"anchor_interval={anchor_interval} must be at least 1 version")
        self._writers = writers or Writers()
        self._store, self._key, self._deltas = store, key, deltas
        self._tied = dict(tied or {})
        self._anchor_interval, self._link_gbit_s, self._lay_out = anchor_interval, link_gbit_s, lay_out
        self._layout: WeightLayout | None = None
        self._owners: dict[str, Owners] = {}
        self._parts: list[tuple[Part, ...]] = []
        self._snapshot: list[list[np.ndarray]] = []
        self._fingerprints: list[UInt64[np.ndarray, "runs"]] = []
        self._base_version: int | None = None
        self._last_version = -1
        self._current: Publication | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._encoders = concurrent.futures.ThreadPoolExecutor(num_threads, "encode")
        if self._writers.is_first:
            for entry in store.catalog().entries:  # of an earlier life: no receiver may build on what this one will not continue
                store.remove(entry.head.key, force=True)

    @property
    def lineage(self) -> str:
        return self._writers.lineage

    @property
    def layout(self) -> WeightLayout:
        """Known after the first publish."""
        assert self._layout is not None, "nothing was published yet"
        return self._layout

    def publish(self, version: int, weights: Mapping[str, Source]) -> Publication:
        """Hand over a version. Returns at once, unless the version before is still on its way: then it waits for that.

        Args:
            weights: checkpoint name -> array, each of the same shape and dtype every time. Whatever numpy can view counts, so
                device arrays are fetched one at a time in the background. They are read until Publication.wait_released. One of
                several processes gives a ShardedTensor for each.

        Raises:
            ValueError: the version does not grow, or names, shapes or dtypes differ from those of the first version.
        """
        if version <= self._last_version:
            raise ValueError(f"version {version} after version {self._last_version}; versions must grow")
        owners = {name: source.owners for name, source in weights.items() if isinstance(source, ShardedTensor)}
        if self._layout is None:
            self._begin(weights, owners)
        self._check(weights)
        if self._current is not None:
            concurrent.futures.wait([self._current._done])
        self._current = Publication(version)
        self._last_version = version
        self._worker.submit(self._publish, self._current, dict(weights), owners)
        return self._current

    def close(self) -> None:
        """Wait for what is on its way and stop the threads. The store and what is in it stay."""
        self._worker.shutdown()
        self._encoders.shutdown()

    def _begin(self, weights: Mapping[str, Source], owners: dict[str, Owners]) -> None:
        """Lay the model out: at the start, and when its tensors are sharded anew."""
        seen: dict[tuple[int, tuple[int, ...], str], str] = {}
        specs: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, array in weights.items():
            if name in self._tied:
                continue
            if isinstance(array, np.ndarray) and array.size:
                first = seen.setdefault((array.__array_interface__["data"][0], array.shape, array.dtype.name), name)
                if first != name:
                    self._tied[name] = first
                    continue
            specs[name] = (tuple(array.shape), np.dtype(array.dtype).name)
        layout = self._lay_out(specs, tied=self._tied, **({"owners": owners} if owners else {}))
        if layout.num_writers > self._writers.num_writers:
            raise ValueError(f"{layout.num_writers} processes own boxes, but there are {self._writers.num_writers} writers")
        self._layout, self._owners, self._base_version = layout, owners, None
        self._parts = [parts_of(t, owners.get(t.name, ()), self._writers.writer) for t in self._layout.tensors]
        self._fingerprints = [np.zeros(tensor.num_runs, np.uint64) for tensor in self._layout.tensors]
        if self._deltas:
            self._snapshot = [
                [np.empty(part.box.num_elements, BITS_DTYPES[part.tensor.dtype]) for part in parts] for parts in self._parts
            ]

    def _check(self, weights: Mapping[str, Source]) -> None:
        missing = [tensor.name for tensor in self.layout.tensors if tensor.name not in weights]
        unknown = [name for name in weights if name not in self.layout.by_name]
        if missing or unknown:
            raise ValueError(f"the model changed its tensors: missing {missing[:5]}, new {unknown[:5]}; start a new publisher")
        for tensor in self.layout.tensors:
            array = weights[tensor.name]
            if tuple(array.shape) != tensor.shape or np.dtype(array.dtype) != DTYPES[tensor.dtype]:
                found = f"{np.dtype(array.dtype).name}{list(array.shape)}"
                raise ValueError(f"{tensor.name} is {found}, it was published as {tensor.dtype}{list(tensor.shape)}")

    def _publish(self, publication: Publication, weights: dict[str, Source], owners: dict[str, Owners]) -> None:
        started_s = time.perf_counter()
        head = self._head(publication.version, self._base_version if self._deltas else None)
        try:
            if owners != self._owners:
                log.warning("version %d is sharded otherwise than the last one: a new layout, from an anchor on", head.version)
                self._begin(weights, owners)
                head = self._head(publication.version, None)
            head = self._open(head, (UpdateKind.DELTA, UpdateKind.ANCHOR))
            self._base_version = None  # until this version is whole, the snapshot is neither the old nor the new one
            source = SourceBits(weights, self.layout, self._parts, self._num_own_runs())
            manifest = self._write(head, lambda tensor_idx, run_idx: self._encode(source, tensor_idx, run_idx, head.base_version))
            publication._released.set()
            if self._deltas:
                self._base_version = publication.version
            report = PublishReport(
                version=publication.version,
                base_version=head.base_version,
                dense_bytes=self.layout.dense_bytes,
                wire_bytes=manifest.wire_bytes,
                changed_elements=manifest.changed_elements,
                num_elements=sum(tensor.num_elements for tensor in self.layout.tensors),
                encode_s=time.perf_counter() - started_s,
            )
        except BaseException as e:
            log.error("publishing version %d failed: %s: %s", publication.version, type(e).__name__, e)
            self._base_version = None
            publication._released.set()
            publication._done.set_exception(e)
            self._withdraw(head.key, f"{type(e).__name__}: {e}")
        else:
            publication._done.set_result(report)
            self._tidy(publication.version)

    def _open(self, mine: UpdateHead, kinds: tuple[UpdateKind, ...]) -> UpdateHead:
        """Begin an update, or join the one that the first process has begun."""
        if self._writers.is_first:
            self._store.open(mine)
            if mine.base_version is None:
                self._store.put(mine.key, LAYOUT_NAME, [self.layout.json_bytes])
            return mine
        head = self._writers.announced(self._store, mine.version, kinds)
        try:
            self._writers.check(head, mine)
        except Exception as e:
            self._withdraw(head.key, f"{type(e).__name__}: {e}")
            raise
        return head

    def _withdraw(self, key: UpdateKey, text: str) -> None:
        try:
            self._store.fail(key, text)
        except Exception as e:
            log.error("and its readers could not be told: %s", e)

    def _head(self, version: int, base_version: int | None) -> UpdateHead:
        return UpdateHead(
            version=version,
            base_version=base_version,
            lineage=self.lineage,
            layout_digest=self.layout.digest,
            num_buckets=len(self.layout.buckets),
            dense_bytes=self.layout.dense_bytes,
        )

    def _write(self, head: UpdateHead, encode: Callable[[int, int], EncodedRun | None]) -> Manifest:
        """Encode and store our buckets of an open update, a few at a time, then see it sealed."""
        waiting: collections.deque[concurrent.futures.Future[tuple[BucketSummary, int]]] = collections.deque()
        done: list[tuple[BucketSummary, int]] = []
        touched: set[int] = set()
        try:
            for bucket_idx, bucket in enumerate(self.layout.buckets):
                if bucket.writer != self._writers.writer:
                    continue
                if len(waiting) == BUCKETS_IN_FLIGHT:
                    done.append(waiting.popleft().result())
                waiting.append(self._encoders.submit(self._write_bucket, head, bucket_idx, bucket, encode, touched))
            done.extend(future.result() for future in waiting)
        finally:
            concurrent.futures.wait(waiting)
        if self._writers.num_writers > 1:  # another process may have touched what we did not
            touched = {tensor_idx for tensor_idx, num_runs in enumerate(self._num_own_runs()) if num_runs}
        part = Manifest(
            head=head,
            buckets=tuple(summary for summary, _ in done),
            fingerprints={t: int(_total(self._fingerprints[t])) for t in sorted(touched)},
            changed_elements=sum(changed for _, changed in done),
        )
        return self._writers.seal(self._store, self.layout, part, self._key)

    def _num_own_runs(self) -> list[int]:
        writer = self._writers.writer
        return [t.writers.count(writer) if t.writers else t.num_runs if writer == 0 else 0 for t in self.layout.tensors]

    def _write_bucket(
        self,
        head: UpdateHead,
        bucket_idx: int,
        bucket: Bucket,
        encode: Callable[[int, int], EncodedRun | None],
        touched: set[int],
    ) -> tuple[BucketSummary, int]:
        writer = BucketWriter(digests=self._key is not None)
        changed = 0
        for run in bucket.runs:
            tensor_idx, run_idx = self.layout.locate(run)
            encoded = encode(tensor_idx, run_idx)
            if encoded is not None:
                writer.add(run, encoded.fingerprint, encoded.parts)
                self._fingerprints[tensor_idx][run_idx] = encoded.fingerprint
                changed += encoded.num_changed
                touched.add(tensor_idx)
        parts, summary = writer.finish()
        self._store.put(head.key, bucket_name(bucket_idx), parts)
        return summary, changed

    def _encode(self, source: SourceBits, tensor_idx: int, run_idx: int, base_version: int | None) -> EncodedRun | None:
        """Encode a run of a new version and bring the snapshot up to it."""
        tensor = self.layout.tensors[tensor_idx]
        part_idx, place = self._place(tensor_idx, run_idx)
        bits = source.bits(tensor_idx)[part_idx]
        if base_version is None:
            if self._deltas:
                copy_run(place.tensor, place.run_idx, bits, self._snapshot[tensor_idx][part_idx])
            encoded: EncodedRun | None = encode_whole_run(tensor, run_idx, bits, None, self._link_gbit_s, place)
        else:
            snapshot = self._snapshot[tensor_idx][part_idx]
            known = int(self._fingerprints[tensor_idx][run_idx])
            encoded = encode_run(tensor, run_idx, snapshot, bits, known, self._link_gbit_s, place)
            if encoded is not None and encoded.changes is not None:
                snapshot[encoded.changes.flat.view(np.int64)] = encoded.changes.new
            elif encoded is not None:
                copy_run(place.tensor, place.run_idx, bits, snapshot)
        source.done(tensor_idx)
        return encoded

    def _place(self, tensor_idx: int, run_idx: int) -> tuple[int, Place]:
        """Which of our parts of a tensor a run of ours lies in, and where in it."""
        parts = self._parts[tensor_idx]
        part_idx = 0
        if len(parts) > 1:
            box = self.layout.tensors[tensor_idx].run(run_idx)[0]
            part_idx = next(i for i, part in enumerate(parts) if part.box.intersection(box) is not None)
        part = parts[part_idx]
        return part_idx, Place(part.local, part.local_run(run_idx))

    def _tidy(self, version: int) -> None:
        """Write the anchor that is due, remove what nobody needs. What fails or is leased is tried again after the next version."""
        head = self._head(version, None)
        try:
            anchor = newest_anchor(self._store.catalog(), self.lineage)
            if self._deltas and (anchor is None or version - anchor >= self._anchor_interval):
                self._write(self._open(head, (UpdateKind.ANCHOR,)), self._encode_snapshot)
            if self._writers.is_first:
                for key in prunable(self._store.catalog().entries, self._store.confirmations()):
                    self._store.remove(key)
        except Exception as e:
            log.error("anchor and pruning after version %d failed: %s: %s", version, type(e).__name__, e)
            self._withdraw(head.key, f"{type(e).__name__}: {e}")

    def _encode_snapshot(self, tensor_idx: int, run_idx: int) -> EncodedRun:
        known = int(self._fingerprints[tensor_idx][run_idx])
        part_idx, place = self._place(tensor_idx, run_idx)
        bits = self._snapshot[tensor_idx][part_idx]
        return encode_whole_run(self.layout.tensors[tensor_idx], run_idx, bits, known, self._link_gbit_s, place)


def _total(fingerprints: UInt64[np.ndarray, "runs"]) -> int:
    total = 0
    for value in fingerprints.tolist():
        total = fingerprint.add(total, value)
    return total
