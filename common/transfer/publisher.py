"""Publisher: the learner's end. Takes each new version, encodes what changed since the last one, and puts it into a store.

`publish` hands the arrays over and returns; comparing, encoding and sending happen bucket by bucket in the background, at most
three buckets at a time. Besides what the store retains it holds one copy of the last published version, against which the next is
compared. Every `anchor_interval` versions an anchor (all values) follows the delta, and what nobody needs any more is pruned.

Invariant: versions are sealed in order and each delta's base is the version sealed before it. What a receiver holds is known from
its own confirmations only. After a failure the update is withdrawn with the reason, and the next version starts with an anchor.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import UInt64

from common.transfer import fingerprint
from common.transfer.bits import BITS_DTYPES, DTYPES, flat_bits
from common.transfer.changes import copy_run
from common.transfer.encoder import EncodedRun, encode_run, encode_whole_run
from common.transfer.manifest import LAYOUT_NAME, BucketSummary, BucketWriter, Manifest, UpdateHead, bucket_name
from common.transfer.paths import prunable
from common.transfer.shards import Bucket, WeightLayout, build_layout
from common.transfer.store.protocol import Store

log = logging.getLogger(__name__)

BUCKETS_IN_FLIGHT = 3
"""Encoded and not yet in the store: bounds the memory beyond the snapshot."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one published version cost. `wire_bytes` are those of its delta (or of its anchor, where it has no delta)."""

    version: int
    base_version: int | None
    dense_bytes: int
    wire_bytes: int
    changed_elements: int
    num_elements: int
    encode_s: float

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.changed_elements / max(self.num_elements, 1)


class Publication:
    """A version on its way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._released = threading.Event()
        self._done: concurrent.futures.Future[PublishReport] = concurrent.futures.Future()

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the arrays that were handed over are no longer read. False if that takes longer than `timeout_s`."""
        return self._released.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> PublishReport:
        """Wait until receivers can have all of it; raises what stopped it, or TimeoutError."""
        return self._done.result(timeout_s)


class Publisher:
    """See the module. Use from one thread; one publisher a store at a time."""

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
    ) -> None:
        """
        Args:
            tied: checkpoint name -> the published name whose values it shares. Arrays that share memory are found to be tied.
            anchor_interval: versions from one anchor to the next.
            link_gbit_s: rate of the slowest link to a receiver, if known: encodings are then chosen by time instead of size.
            key: signs manifests and adds SHA-256 digests to runs, for stores or relays that are not trusted.
            deltas: False publishes every version whole and keeps no copy (a baseline to measure against).
        """
        if anchor_interval < 1:
            raise ValueError(f"anchor_interval={anchor_interval} must be at least 1 version")
        self.lineage = uuid.uuid4().hex[:16]
        self._store, self._key, self._deltas = store, key, deltas
        self._tied = dict(tied or {})
        self._anchor_interval, self._link_gbit_s, self._lay_out = anchor_interval, link_gbit_s, lay_out
        self._layout: WeightLayout | None = None
        self._snapshot: list[np.ndarray] = []
        self._fingerprints: list[UInt64[np.ndarray, "runs"]] = []
        self._base_version: int | None = None
        self._last_version = -1
        self._last_anchor = -1
        self._current: Publication | None = None
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "publish")
        self._encoders = concurrent.futures.ThreadPoolExecutor(num_threads, "encode")
        for entry in store.catalog().entries:  # of an earlier life: no receiver may build on what this one will not continue
            store.remove(entry.head.key, force=True)

    @property
    def layout(self) -> WeightLayout:
        """Known after the first publish."""
        assert self._layout is not None, "nothing was published yet"
        return self._layout

    def publish(self, version: int, weights: Mapping[str, np.ndarray]) -> Publication:
        """Hand over a version. Returns at once, unless the version before is still on its way: then it waits for that.

        Args:
            weights: checkpoint name -> array, each of the same shape and dtype every time. Whatever numpy can view counts, so
                device arrays are fetched one at a time in the background. They are read until Publication.wait_released.

        Raises:
            ValueError: the version does not grow, or names, shapes or dtypes differ from those of the first version.
        """
        if version <= self._last_version:
            raise ValueError(f"version {version} after version {self._last_version}; versions must grow")
        if self._layout is None:
            self._begin(weights)
        self._check(weights)
        if self._current is not None:
            concurrent.futures.wait([self._current._done])
        self._current = Publication(version)
        self._last_version = version
        self._worker.submit(self._publish, self._current, dict(weights))
        return self._current

    def close(self) -> None:
        """Wait for what is on its way and stop the threads. The store and what is in it stay."""
        self._worker.shutdown()
        self._encoders.shutdown()

    def _begin(self, weights: Mapping[str, np.ndarray]) -> None:
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
        self._layout = self._lay_out(specs, tied=self._tied)
        self._fingerprints = [np.zeros(tensor.num_runs, np.uint64) for tensor in self._layout.tensors]
        if self._deltas:
            self._snapshot = [np.empty(tensor.num_elements, BITS_DTYPES[tensor.dtype]) for tensor in self._layout.tensors]

    def _check(self, weights: Mapping[str, np.ndarray]) -> None:
        missing = [tensor.name for tensor in self.layout.tensors if tensor.name not in weights]
        unknown = [name for name in weights if name not in self.layout.by_name]
        if missing or unknown:
            raise ValueError(f"the model changed its tensors: missing {missing[:5]}, new {unknown[:5]}; start a new publisher")
        for tensor in self.layout.tensors:
            array = weights[tensor.name]
            if tuple(array.shape) != tensor.shape or np.dtype(array.dtype) != DTYPES[tensor.dtype]:
                found = f"{np.dtype(array.dtype).name}{list(array.shape)}"
                raise ValueError(f"{tensor.name} is {found}, it was published as {tensor.dtype}{list(tensor.shape)}")

    def _publish(self, publication: Publication, weights: dict[str, np.ndarray]) -> None:
        started_s = time.perf_counter()
        base_version = self._base_version if self._deltas else None
        head = self._head(publication.version, base_version)
        try:
            self._base_version = None  # until this version is whole, the snapshot is neither the old nor the new one
            source = _Source(weights, self.layout)
            manifest = self._write(head, lambda tensor_idx, run_idx: self._encode(source, tensor_idx, run_idx, base_version))
            publication._released.set()
            if self._deltas:
                self._base_version = publication.version
            self._last_anchor = self._last_anchor if base_version is not None else publication.version
            report = PublishReport(
                version=publication.version,
                base_version=base_version,
                dense_bytes=self.layout.dense_bytes,
                wire_bytes=manifest.wire_bytes,
                changed_elements=manifest.changed_elements,
                num_elements=sum(tensor.num_elements for tensor in self.layout.tensors),
                encode_s=time.perf_counter() - started_s,
            )
        except BaseException as e:
            log.error("publishing version %d failed: %s: %s", publication.version, type(e).__name__, e)
            publication._released.set()
            publication._done.set_exception(e)
            self._withdraw(head, f"{type(e).__name__}: {e}")
        else:
            publication._done.set_result(report)
            self._tidy(publication.version)

    def _withdraw(self, head: UpdateHead, text: str) -> None:
        try:
            self._store.fail(head.key, text)
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
        """Encode and store an update, a few buckets at a time, then seal it."""
        self._store.open(head)
        if head.base_version is None:
            self._store.put(head.key, LAYOUT_NAME, [self.layout.json_bytes])
        waiting: collections.deque[concurrent.futures.Future[tuple[BucketSummary, int]]] = collections.deque()
        done: list[tuple[BucketSummary, int]] = []
        touched: set[int] = set()
        try:
            for bucket_idx, bucket in enumerate(self.layout.buckets):
                if len(waiting) == BUCKETS_IN_FLIGHT:
                    done.append(waiting.popleft().result())
                waiting.append(self._encoders.submit(self._write_bucket, head, bucket_idx, bucket, encode, touched))
            done.extend(future.result() for future in waiting)
        finally:
            concurrent.futures.wait(waiting)
        sums = {t: int(_total(self._fingerprints[t])) for t in sorted(touched)}
        manifest = Manifest(
            head=head,
            buckets=tuple(summary for summary, _ in done),
            fingerprints=sums,
            changed_elements=sum(changed for _, changed in done),
        )
        self._store.seal(head.key, manifest.to_bytes(self._key))
        return manifest

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

    def _encode(self, source: _Source, tensor_idx: int, run_idx: int, base_version: int | None) -> EncodedRun | None:
        """Encode a run of a new version and bring the snapshot up to it."""
        tensor = self.layout.tensors[tensor_idx]
        bits = source.bits(tensor_idx)
        if base_version is None:
            if self._deltas:
                self._copy_to_snapshot(tensor_idx, run_idx, bits)
            encoded: EncodedRun | None = encode_whole_run(tensor, run_idx, bits, None, self._link_gbit_s)
        else:
            snapshot = self._snapshot[tensor_idx]
            known = int(self._fingerprints[tensor_idx][run_idx])
            encoded = encode_run(tensor, run_idx, snapshot, bits, known, self._link_gbit_s)
            if encoded is not None and encoded.changes is not None:
                snapshot[encoded.changes.flat.view(np.int64)] = encoded.changes.new
            elif encoded is not None:
                self._copy_to_snapshot(tensor_idx, run_idx, bits)
        source.done(tensor_idx)
        return encoded

    def _copy_to_snapshot(self, tensor_idx: int, run_idx: int, bits: np.ndarray) -> None:
        copy_run(self.layout.tensors[tensor_idx], run_idx, bits, self._snapshot[tensor_idx])

    def _tidy(self, version: int) -> None:
        """Write the anchor that is due, remove what nobody needs. What fails or is leased is tried again after the next version."""
        head = self._head(version, None)
        try:
            if self._deltas and version - self._last_anchor >= self._anchor_interval:
                self._write(head, self._encode_snapshot)
                self._last_anchor = version
            for key in prunable(self._store.catalog().entries, self._store.confirmations()):
                self._store.remove(key)
        except Exception as e:
            log.error("anchor and pruning after version %d failed: %s: %s", version, type(e).__name__, e)
            self._withdraw(head, f"{type(e).__name__}: {e}")

    def _encode_snapshot(self, tensor_idx: int, run_idx: int) -> EncodedRun:
        known = int(self._fingerprints[tensor_idx][run_idx])
        return encode_whole_run(self.layout.tensors[tensor_idx], run_idx, self._snapshot[tensor_idx], known, self._link_gbit_s)


def _total(fingerprints: UInt64[np.ndarray, "runs"]) -> int:
    total = 0
    for value in fingerprints.tolist():
        total = fingerprint.add(total, value)
    return total


class _Source:
    """The new version's arrays as flat bits, made when first asked for and let go after the last run of each tensor."""

    def __init__(self, weights: dict[str, np.ndarray], layout: WeightLayout) -> None:
        self._weights, self._tensors = weights, layout.tensors
        self._runs_left = [tensor.num_runs for tensor in layout.tensors]
        self._bits: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def bits(self, tensor_idx: int) -> np.ndarray:
        with self._lock:
            if tensor_idx not in self._bits:
                tensor = self._tensors[tensor_idx]
                bits = flat_bits(np.ascontiguousarray(self._weights[tensor.name]))
                for alias in tensor.tied:
                    other = self._weights.pop(alias, None)
                    if other is not None and not np.array_equal(flat_bits(np.ascontiguousarray(other)), bits):
                        raise ValueError(f"{alias} and {tensor.name} were tied and now differ; start a new publisher")
                self._bits[tensor_idx] = bits
            return self._bits[tensor_idx]

    def done(self, tensor_idx: int) -> None:
        """One run of a tensor was encoded."""
        with self._lock:
            self._runs_left[tensor_idx] -= 1
            if self._runs_left[tensor_idx] == 0:
                del self._bits[tensor_idx], self._weights[self._tensors[tensor_idx].name]
