"""Whatever bytes come instead of an update: a clear error and untouched live weights, or exactly the published weights."""

import dataclasses
import functools
import json
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from common.transfer.errors import AuthenticationError, ChecksumError, FingerprintMismatchError, MalformedUpdateError, TransferError
from common.transfer.manifest import BucketWriter, UpdateKey, UpdateKind, parse_bucket_index, parse_manifest
from common.transfer.publisher import Publisher
from common.transfer.shards import WeightLayout
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from tests.common.transfer.models import Weights, assert_equal_bits, blank, make_model, small_step

KEY = b"0123456789abcdef"
ANCHOR, DELTA = UpdateKey(0, UpdateKind.ANCHOR), UpdateKey(1, UpdateKind.DELTA)
OBJECTS = [(ANCHOR, "layout"), (ANCHOR, "b00000"), (ANCHOR, "manifest"), (DELTA, "b00000"), (DELTA, "manifest")]

Mutation = Callable[[bytes], bytes]


class TamperedStore(MemoryStore):
    """A MemoryStore one of whose objects arrives changed."""

    def __init__(self) -> None:
        super().__init__()
        self.changed: dict[tuple[UpdateKey, str], Mutation] = {}

    def read(
        self, key: UpdateKey, name: str, *, timeout_s: float, into: memoryview | None = None, **span: int | None
    ) -> memoryview:  # type: ignore[override]
        content = super().read(key, name, timeout_s=timeout_s, **span)  # type: ignore[arg-type]
        if (key, name) in self.changed:
            content = memoryview(self.changed[key, name](bytes(content)))
        if into is not None and len(content) > len(into):
            raise MalformedUpdateError("larger than there is room")
        return content


@functools.cache
def models() -> tuple[Weights, Weights]:
    first = make_model(width=64)
    return first, small_step(first, 1, share=0.03)


def published(key: bytes | None) -> TamperedStore:
    store = TamperedStore()
    publisher = Publisher(store, anchor_interval=100, key=key)
    for version, model in enumerate(models()):
        publisher.publish(version, model).result(10)
    publisher.close()
    return store


def attack(store: TamperedStore, where: tuple[UpdateKey, str], mutation: Mutation, key: bytes | None) -> TransferError | None:
    """Let a replica that holds what the attack leaves intact fetch the rest; checks the law and returns the error, if any."""
    first, second = models()
    arrays = blank(first)
    subscriber = Subscriber(store, NumpyTarget(arrays), receiver_id="r", key=key, timeout_s=1.0)
    held = arrays
    store.changed = {}
    if where[0] == DELTA:
        staged = subscriber.stage(0)
        assert staged is not None
        subscriber.commit(staged)
        held = first
    before = {name: array.copy() for name, array in held.items()}
    store.changed = {where: mutation}
    try:
        staged = subscriber.stage(0 if where[0] == ANCHOR else 1)
    except TransferError as e:
        error, staged = e, None
    finally:
        subscriber.close()
    if staged is None:
        assert str(error)
        assert_equal_bits(arrays, before)
        return error
    assert_equal_bits(arrays, before)
    subscriber.commit(staged)
    assert_equal_bits(arrays, first if where[0] == ANCHOR else second)
    return None


def flip(position: int, mask: int) -> Mutation:
    def mutate(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position % len(content)] ^= mask
        return bytes(changed)

    return mutate


def splice(start: int, dropped: int, inserted: bytes) -> Mutation:
    return lambda content: content[: start % len(content)] + inserted + content[start % len(content) + dropped :]


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("where", OBJECTS, ids=lambda where: f"{where[0].path}/{where[1]}")
def test_flips_cuts_and_splices_never_reach_the_weights(where: tuple[UpdateKey, str], key: bytes | None) -> None:
    store = published(key)
    rng = np.random.default_rng(zlib.crc32(repr(where).encode()))
    refused = 0
    mutations: list[Mutation] = [lambda content: b"", lambda content: content + b"\0", lambda content: content[:-1]]
    mutations += [flip(i, 0xFF) for i in range(24)]
    for _ in range(40):
        position = int(rng.integers(0, 1 << 30))
        mutations += [
            flip(position, 1 << int(rng.integers(0, 8))),
            splice(position, int(rng.integers(0, 40)), rng.bytes(int(rng.integers(0, 40)))),
            lambda content, position=position: content[: position % len(content)],
        ]
    for mutation in mutations:
        refused += attack(store, where, mutation, key) is not None
    assert refused > 0.8 * len(mutations)
    assert attack(store, where, lambda content: content, key) is None


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, b"XXXX"), (4, b"\2"), (8, b"\xff\xff\xff\xff"), (12, b"\xff\xff\xff\xff"), (16, b"\xff\xff\xff\xff"), (16, b"\0\0\0\0")],
)
def test_lengths_beyond_the_possible_are_refused(position: int, value: bytes) -> None:
    store = published(None)
    for key in (ANCHOR, DELTA):
        error = attack(store, (key, "b00000"), lambda c: c[:position] + value + c[position + len(value) :], None)
        assert isinstance(error, MalformedUpdateError)


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"null",
        b"[]",
        b'{"format":1}',
        b'{"format":2}',
        b"[" * 100_000,
        b'{"format":1,"head":{},"buckets":[],"fingerprints":{},"changed_elements":0}',
        b"\xff\xfe",
    ],
)
def test_manifests_that_nobody_writes_are_refused(manifest: bytes) -> None:
    assert isinstance(attack(published(None), (DELTA, "manifest"), lambda _: manifest, None), MalformedUpdateError)


def manifest_with(store: TamperedStore, **changes: object) -> bytes:
    fields = json.loads(bytes(store.read(DELTA, "manifest", timeout_s=1.0)))
    return json.dumps(fields | changes).encode()


def test_manifests_that_contradict_the_rest_are_refused() -> None:
    store = published(None)
    summary = json.loads(manifest_with(store))["buckets"][0]
    head = json.loads(manifest_with(store))["head"]
    for changes, kind in (
        ({"fingerprints": {"0": "0" * 16}}, FingerprintMismatchError),
        ({"fingerprints": {"999999": "0" * 16}}, MalformedUpdateError),
        ({"fingerprints": {"-1": "0" * 16}}, MalformedUpdateError),
        ({"buckets": []}, MalformedUpdateError),
        ({"buckets": [[summary[0] + 1, *summary[1:]]]}, ChecksumError),
        ({"buckets": [[*summary[:2], "0" * 64]]}, ChecksumError),
        ({"buckets": [[1e300, *summary[1:]]]}, MalformedUpdateError),
        ({"head": head | {"version": 7}}, MalformedUpdateError),
        ({"head": head | {"base_version": 5}}, MalformedUpdateError),
    ):
        changed = manifest_with(store, **changes)
        assert isinstance(attack(store, (DELTA, "manifest"), lambda _, c=changed: c, None), kind), changes


def test_a_relay_cannot_forge_an_update_without_the_key() -> None:
    """The forger knows the format and recomputes every checksum; all that it lacks is the key."""
    store = published(KEY)
    manifest = parse_manifest(store.read(DELTA, "manifest", timeout_s=1.0), KEY)
    with pytest.raises(AuthenticationError):
        parse_manifest(memoryview(manifest.to_bytes(b"another key 1234")), KEY)
    assert isinstance(attack(store, (DELTA, "manifest"), lambda _: manifest.to_bytes(None), KEY), AuthenticationError)
    other = dataclasses.replace(manifest, changed_elements=1)
    assert isinstance(attack(store, (DELTA, "manifest"), lambda _: other.to_bytes(b"another key 1234"), KEY), AuthenticationError)
    layout = layout_of_models()
    bucket = layout.buckets[0]

    def forge(content: bytes) -> bytes:
        entries, _ = parse_bucket_index(memoryview(content), bucket, layout)
        writer = BucketWriter(digests=True)
        for entry in entries[:-1]:
            writer.add(entry.run, entry.fingerprint, [content[entry.offset : entry.offset + entry.length]])
        return b"".join(writer.finish()[0])

    assert isinstance(attack(store, (DELTA, "b00000"), forge, KEY), ChecksumError)


def layout_of_models() -> WeightLayout:
    publisher = Publisher(MemoryStore())
    publisher.publish(0, models()[0]).result(10)
    return publisher.layout


def test_same_checksum_but_other_bytes_shows_in_the_digest() -> None:
    """xxh3 is not made to withstand anybody; with a key each run also has a SHA-256."""
    writer = BucketWriter(digests=True)
    writer.add(0, 0, [b"payload"])
    parts, _ = writer.finish()
    content = b"".join(parts)
    layout = layout_of_models()
    entry = parse_bucket_index(memoryview(content), layout.buckets[0], layout)[0][0]
    entry.check(memoryview(b"payload"))
    collided = dataclasses.replace(entry, checksum=xxhash.xxh3_64_intdigest(b"evil"))
    with pytest.raises(ChecksumError, match="SHA-256"):
        collided.check(memoryview(b"evil"))
