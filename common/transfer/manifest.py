"""What describes an update: its head (announced first), an index at the front of every bucket, and the manifest (written last).

An update takes a model from one version to another: a delta has a base version, an anchor (every element) has none. Buckets become
readable while later ones are still being encoded, so what a receiver decodes before the manifest arrives is provisional: the
manifest names every bucket's length and the SHA-256 of its index, the index names every run's length, fingerprint and checksum, and
an update counts as staged only when all of it agrees. With a key the manifest carries an HMAC and runs carry SHA-256 digests, so
that a relay in between needs no trust; without, runs carry xxh3, against accidents.

Parsers here refuse whatever an honest publisher does not write, with MalformedUpdateError, before memory is taken for it.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import hashlib
import hmac
import json
import struct

import numpy as np
import xxhash

from common.transfer.errors import AuthenticationError, ChecksumError, MalformedUpdateError, TruncatedError
from common.transfer.shards import Bucket, WeightLayout

FORMAT = 1
MAGIC = b"RSB1"
_PREFIX = struct.Struct("<4sBxxxI")
MAX_MANIFEST_BYTES = 64 << 20
MAX_LAYOUT_BYTES = 256 << 20
RUN_HEADER_BYTES = 256
"""No run is longer than its dense size plus this: the encoder falls back to the plain values."""
MAX_VERSION = 1 << 53


class UpdateKind(enum.StrEnum):
    DELTA = "delta"
    ANCHOR = "anchor"


@dataclasses.dataclass(frozen=True, order=True)
class UpdateKey:
    """Names one update within a store: a version may have both a delta and an anchor."""

    version: int
    kind: UpdateKind

    @property
    def path(self) -> str:
        return f"v{self.version}/{self.kind}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateHead:
    """What is known of an update before its first bucket. A lineage is one life of a publisher: two of them share no version."""

    version: int
    base_version: int | None
    lineage: str
    layout_digest: str
    num_buckets: int
    dense_bytes: int

    @property
    def key(self) -> UpdateKey:
        return UpdateKey(self.version, UpdateKind.ANCHOR if self.base_version is None else UpdateKind.DELTA)

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def parse_head(fields: object) -> UpdateHead:
    names = [field.name for field in dataclasses.fields(UpdateHead)]
    if not isinstance(fields, dict) or sorted(fields) != sorted(names):
        raise MalformedUpdateError(f"an update's head needs exactly the fields {', '.join(names)}")
    for name in ("version", "num_buckets", "dense_bytes"):
        _check_count(name, fields[name])
    if fields["base_version"] is not None:
        _check_count("base_version", fields["base_version"])
        if fields["base_version"] >= fields["version"]:
            raise MalformedUpdateError(f"base version {fields['base_version']} is not before version {fields['version']}")
    for name in ("lineage", "layout_digest"):
        if not isinstance(fields[name], str) or not 0 < len(fields[name]) <= 64 or not fields[name].isalnum():
            raise MalformedUpdateError(f"{name} {fields[name]!r:.80} is not a short alphanumeric string")
    return UpdateHead(**fields)


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value < MAX_VERSION:
        raise MalformedUpdateError(f"{name} {value!r:.80} is not a count")


def bucket_name(bucket_idx: int) -> str:
    return f"b{bucket_idx:05d}"


def part_name(writer: int) -> str:
    return f"p{writer:05d}"


LAYOUT_NAME = "layout"
MANIFEST_NAME = "manifest"


# A bucket is prefix, one record per run, one digest per run (if any), then the payloads of the runs.
_RECORD = np.dtype([("run", "<u4"), ("length", "<u4"), ("fingerprint", "<u8"), ("checksum", "<u8")])


@dataclasses.dataclass(frozen=True)
class RunEntry:
    """One encoded run in a bucket: where it lies in the bucket object, and what it must add up to."""

    run: int
    offset: int
    length: int
    fingerprint: int
    checksum: int
    sha256: bytes | None

    def check(self, payload: memoryview) -> None:
        """Raises ChecksumError unless `payload` is what the publisher wrote."""
        if xxhash.xxh3_64_intdigest(payload) != self.checksum:
            raise ChecksumError(f"run {self.run}: {len(payload)} bytes do not have the announced checksum")
        if self.sha256 is not None and hashlib.sha256(payload).digest()[:16] != self.sha256:
            raise ChecksumError(f"run {self.run}: {len(payload)} bytes do not have the announced SHA-256")


class BucketWriter:
    """Collects the encoded runs of one bucket."""

    def __init__(self, *, digests: bool) -> None:
        self._digests = digests
        self._records: list[tuple[int, int, int, int]] = []
        self._sha256: list[bytes] = []
        self._payload: list[bytes | memoryview] = []

    def add(self, run: int, fingerprint: int, parts: list[bytes | memoryview]) -> None:
        """Append a run; runs come in ascending order. The parts are kept, not copied."""
        checksum = xxhash.xxh3_64()
        sha256 = hashlib.sha256() if self._digests else None
        for part in parts:
            checksum.update(part)
            if sha256 is not None:
                sha256.update(part)
        self._records.append((run, sum(map(len, parts)), fingerprint, checksum.intdigest()))
        if sha256 is not None:
            self._sha256.append(sha256.digest()[:16])
        self._payload.extend(parts)

    def finish(self) -> tuple[list[bytes | memoryview], "BucketSummary"]:
        """The pieces of the bucket object in order, and its line in the manifest."""
        prefix = _PREFIX.pack(MAGIC, int(self._digests), len(self._records))
        index = prefix + np.array(self._records, _RECORD).tobytes() + b"".join(self._sha256)
        payload_bytes = sum(record[1] for record in self._records)
        summary = BucketSummary(len(index) + payload_bytes, len(index), hashlib.sha256(index).hexdigest())
        return [index, *self._payload], summary


@dataclasses.dataclass(frozen=True)
class BucketSummary:
    """A bucket as the manifest lists it: bytes of the object, of the index at its front, and the index's SHA-256."""

    object_bytes: int
    index_bytes: int
    index_sha256: str


def max_bucket_bytes(bucket: Bucket) -> int:
    """No honest bucket object is longer."""
    return max_index_bytes(bucket) + bucket.dense_bytes + len(bucket.runs) * RUN_HEADER_BYTES


def max_index_bytes(bucket: Bucket) -> int:
    """No honest index of this bucket is longer."""
    return _PREFIX.size + len(bucket.runs) * (_RECORD.itemsize + 16)


INDEX_PREFIX_BYTES = _PREFIX.size


def index_bytes(prefix: memoryview, bucket: Bucket) -> int:
    """Length of a bucket's index from the first INDEX_PREFIX_BYTES of the object."""
    if len(prefix) < _PREFIX.size:
        raise TruncatedError(f"a bucket of {len(prefix)} bytes ends within its prefix")
    magic, digests, num_runs = _PREFIX.unpack(prefix[: _PREFIX.size])
    if magic != MAGIC or digests > 1 or num_runs > len(bucket.runs):
        raise MalformedUpdateError(f"a bucket starts with {bytes(prefix[:12])!r}; expected {MAGIC!r} and at most the bucket's runs")
    return _PREFIX.size + num_runs * (_RECORD.itemsize + 16 * digests)


def parse_bucket_index(index: memoryview, bucket: Bucket, layout: WeightLayout) -> tuple[list[RunEntry], BucketSummary]:
    """The runs that a bucket holds and the summary that the manifest must confirm, from the front of the object.

    Args:
        index: at least the whole index; what follows is ignored.
    """
    size = index_bytes(index, bucket)
    if len(index) < size:
        raise TruncatedError(f"a bucket index of {size} bytes of which {len(index)} came")
    _, digests, num_runs = _PREFIX.unpack(index[: _PREFIX.size])
    end_of_records = _PREFIX.size + num_runs * _RECORD.itemsize
    records = np.frombuffer(index[_PREFIX.size : end_of_records], _RECORD)
    entries = []
    offset, place = size, 0
    for i, (run, length, fingerprint, checksum) in enumerate(records.tolist()):
        place = bisect.bisect_left(bucket.runs, run, place)
        if place == len(bucket.runs) or bucket.runs[place] != run:
            raise MalformedUpdateError(f"run {run} as number {i} of a bucket of {len(bucket.runs)} other runs, or out of order")
        place += 1
        if not 0 < length <= layout.run_bytes(run) + RUN_HEADER_BYTES:
            raise MalformedUpdateError(f"run {run} of {layout.run_bytes(run)} dense bytes announces {length} encoded ones")
        start = end_of_records + 16 * i
        sha256 = bytes(index[start : start + 16]) if digests else None
        entries.append(RunEntry(run, offset, length, fingerprint, checksum, sha256))
        offset += length
    return entries, BucketSummary(offset, size, hashlib.sha256(index[:size]).hexdigest())


def check_bucket(content: memoryview) -> BucketSummary:
    """The summary of a whole bucket object whose runs all have the length and the checksums of its own index.

    Needs no layout, so whoever passes buckets on can tell damaged ones. Only a manifest tells forged ones.

    Raises:
        ChecksumError, MalformedUpdateError: the bytes are not those of a whole bucket.
    """
    if len(content) < _PREFIX.size:
        raise TruncatedError(f"a bucket of {len(content)} bytes ends within its prefix")
    magic, digests, num_runs = _PREFIX.unpack(content[: _PREFIX.size])
    end_of_records = _PREFIX.size + num_runs * _RECORD.itemsize
    size = end_of_records + num_runs * 16 * digests
    if magic != MAGIC or digests > 1 or len(content) < size:
        raise MalformedUpdateError(f"{len(content)} bytes that start with {bytes(content[:12])!r} are no bucket")
    offset = size
    for i, (run, length, fingerprint, checksum) in enumerate(
        np.frombuffer(content[_PREFIX.size : end_of_records], _RECORD).tolist()
    ):
        start = end_of_records + 16 * i
        sha256 = bytes(content[start : start + 16]) if digests else None
        if offset + length > len(content):
            raise TruncatedError(f"run {run} ends at byte {offset + length} of a bucket of {len(content)}")
        RunEntry(run, offset, length, fingerprint, checksum, sha256).check(content[offset : offset + length])
        offset += length
    if offset != len(content):
        raise MalformedUpdateError(f"a bucket of {len(content)} bytes whose runs end at byte {offset}")
    return BucketSummary(len(content), size, hashlib.sha256(content[:size]).hexdigest())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The last word on an update. `fingerprints`: by tensor index, for each tensor of which anything travelled.

    One of several writers puts its own part first, as an object of its own: its buckets, and of each tensor the fingerprint of its
    own runs. What receivers read is the sum of all parts, which has no `writer`.
    """

    head: UpdateHead
    buckets: tuple[BucketSummary, ...]
    fingerprints: dict[int, int]
    changed_elements: int
    writer: int | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes of all buckets."""
        return sum(bucket.object_bytes for bucket in self.buckets)

    def to_bytes(self, key: bytes | None) -> bytes:
        """JSON, and with a key a second line with its HMAC-SHA256."""
        body = json.dumps(
            {
                "format": FORMAT,
                "head": self.head.to_json(),
                "buckets": [[b.object_bytes, b.index_bytes, b.index_sha256] for b in self.buckets],
                "fingerprints": {str(i): f"{value:016x}" for i, value in self.fingerprints.items()},
                "changed_elements": self.changed_elements,
                **({} if self.writer is None else {"writer": self.writer}),
            },
            separators=(",", ":"),
        ).encode()
        return body if key is None else body + b"\n" + sign(body, key)


def sign(body: bytes | memoryview, key: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


def parse_manifest(payload: memoryview, key: bytes | None, *, writer: int | None = None) -> Manifest:
    """The manifest of an update, or the part that `writer` put.

    Raises:
        AuthenticationError: a key is given and the signature does not fit.
        MalformedUpdateError: anything else.
    """
    body, _, signature = bytes(payload).partition(b"\n")
    if key is not None and not hmac.compare_digest(signature, sign(body, key)):
        raise AuthenticationError("the manifest is not signed with the key held here; compare the key files of both sides")
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError(f"format {FORMAT} is expected")
        head = parse_head(fields["head"])
        buckets = tuple(_parse_summary(row) for row in fields["buckets"])
        fingerprints = {int(i): int(value, 16) for i, value in fields["fingerprints"].items()}
        _check_count("changed_elements", fields["changed_elements"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise MalformedUpdateError(f"manifest: {type(e).__name__}: {e}") from None
    if fields.get("writer") != writer:
        raise MalformedUpdateError(f"manifest of {head.key.path}: by writer {fields.get('writer')!r:.20}, expected {writer}")
    if writer is None and len(buckets) != head.num_buckets:
        raise MalformedUpdateError(f"manifest of {head.key.path}: {len(buckets)} buckets, its head says {head.num_buckets}")
    return Manifest(
        head=head, buckets=buckets, fingerprints=fingerprints, changed_elements=fields["changed_elements"], writer=writer
    )


def _parse_summary(row: object) -> BucketSummary:
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[2], str):
        raise ValueError("a bucket is [bytes, index bytes, SHA-256]")
    _check_count("bytes of a bucket", row[0])
    _check_count("bytes of an index", row[1])
    return BucketSummary(*row)
