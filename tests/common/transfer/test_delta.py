"""Laws of the run codec: exact for every bit pattern, within the entropy bound, and safe against any bytes."""

import functools

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transfer import changes, delta
from common.transfer.bits import BITS_DTYPES, DTYPES, flat_bits, from_bits
from common.transfer.errors import MalformedUpdateError, TruncatedError
from common.transfer.shards import build_layout
from common.transfer.streams import StreamWriter, inflate


def through_the_codec(old: np.ndarray, new: np.ndarray, *, min_run_bytes: int = 1 << 20, name: str = "w") -> np.ndarray:
    """Send `new` run by run as differences to `old` and return what arrives."""
    layout = build_layout({name: (old.shape, old.dtype.name)}, min_run_bytes=min_run_bytes)
    tensor = layout.tensors[0]
    old_bits, new_bits, got = flat_bits(old), flat_bits(new), flat_bits(old.copy())
    for run in range(tensor.num_runs):
        size = sum(box.num_elements for box in tensor.run(run))
        found = changes.find_changes(tensor, run, old_bits, new_bits)
        if len(found.local) == 0:
            continue
        payload = b"".join(delta.encode_changes(found.local, found.old, found.new, size))
        decoded = delta.decode_run(memoryview(payload), size, old_bits.dtype)
        assert decoded.steps is not None
        mine = changes.gather_run(tensor, run, old_bits).copy()
        if decoded.local is None:
            dense, count = delta.encode_dense_changes(mine, changes.gather_run(tensor, run, new_bits))
            assert (b"".join(dense), count) == (payload, len(found.local))
            mine += decoded.steps
        else:
            np.testing.assert_array_equal(decoded.local, found.local)
            mine[decoded.local] += decoded.steps
        changes.scatter_run(tensor, run, mine, got)
    return from_bits(got, old.dtype.name, old.shape)


def patterns(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    bits = rng.integers(0, 256, (*shape, DTYPES[dtype].itemsize), dtype=np.uint8)
    return from_bits(bits.reshape(-1).view(BITS_DTYPES[dtype]), dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.0005, 0.01, 0.1, 0.5, 1.0])
def test_any_bit_pattern_becomes_any_other(dtype: str, share: float) -> None:
    rng = np.random.default_rng(0)
    old = patterns(rng, dtype, (160, 70))
    new = old.copy()
    changed = rng.random(old.shape) < share
    new[changed] = patterns(rng, dtype, old.shape)[changed]
    assert through_the_codec(old, new, min_run_bytes=500).tobytes() == new.tobytes()
    assert through_the_codec(old, new, min_run_bytes=500, name="o_proj.weight").tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_payloads_negative_zero_and_infinities_survive(dtype: str) -> None:
    width = BITS_DTYPES[dtype]
    top = 1 << (8 * width.itemsize - 1)
    specials = np.array([0, top, top - 1, 2 * top - 1, top | 1, 1, top - 2], width)
    special_floats = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0], DTYPES[dtype]).view(width)
    every = np.concatenate([specials, special_floats])
    old, new = (x.reshape(-1) for x in np.meshgrid(every, every))
    arrived = through_the_codec(old.copy().view(DTYPES[dtype]), new.copy().view(DTYPES[dtype]))
    assert arrived.tobytes() == new.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (7,), (5, 3), (2, 3, 4, 5)])
def test_odd_shapes_travel(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    old = patterns(rng, "bfloat16", shape)
    assert through_the_codec(old, patterns(rng, "bfloat16", shape)).shape == shape
    new = patterns(rng, "bfloat16", shape)
    assert through_the_codec(old, new).tobytes() == new.tobytes()


@pytest.mark.parametrize("gap", [1, 2, 254, 255, 256, 257, 369, 371, 70_000, 371 << 8, 400_000])
def test_gaps_at_the_edges_of_their_bytes(gap: int) -> None:
    old = np.zeros(4 * gap + 7, np.int8)
    new = old.copy()
    new[gap - 1 :: gap] = 1
    assert (through_the_codec(old, new) == new).all()


def test_uneven_gaps_escape_more_than_once() -> None:
    old = np.zeros(3_000_000, np.int8)
    new = old.copy()
    new[[0, 1, 2, 3, 1_000, 2_999_999]] = -128
    new[1_000_000:1_030_000] = 3
    assert (through_the_codec(old, new) == new).all()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_of_random_models_arrive(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 33), min_size=1, max_size=3)))
    dtype = data.draw(st.sampled_from(sorted(DTYPES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    old = patterns(rng, dtype, shape)
    new = old.copy()
    changed = rng.random(shape) < data.draw(st.sampled_from([0.01, 0.2, 0.8]))
    new[changed] = patterns(rng, dtype, shape)[changed]
    name = data.draw(st.sampled_from(["w", "down_proj.weight"]))
    arrived = through_the_codec(old, new, min_run_bytes=data.draw(st.sampled_from([16, 200])), name=name)
    assert arrived.tobytes() == new.tobytes()


@pytest.mark.parametrize(("unchanged", "limit"), [(0.99, 1.05), (0.97, 1.05), (0.9, 1.05), (0.5, 1.01)])
def test_small_steps_cost_close_to_their_entropy(unchanged: float, limit: float) -> None:
    rng = np.random.default_rng(2)
    size = 1_000_000
    local = np.flatnonzero(rng.random(size) >= unchanged).astype(np.uint32)
    old = rng.integers(0, 1 << 16, len(local), dtype=np.uint16)
    new = old + np.where(rng.random(len(local)) < 0.5, 1, -1).astype(np.uint16)
    payload = b"".join(delta.encode_changes(local, old, new, size))
    p = 1 - unchanged
    bound_bits = size * (-p * np.log2(p) - unchanged * np.log2(unchanged) + p)
    assert 8 * len(payload) <= limit * bound_bits


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_runs_arrive(dtype: str, compress: bool) -> None:
    bits = flat_bits((np.random.default_rng(3).standard_normal(5000) * 0.02).astype(DTYPES[dtype]))
    payload = memoryview(b"".join(delta.encode_whole(bits, compress=compress)))
    values = delta.decode_run(payload, 5000, bits.dtype).values
    assert values is not None
    np.testing.assert_array_equal(values, bits)
    if compress and dtype in ("float32", "bfloat16"):
        assert len(payload) < 0.9 * bits.nbytes


@functools.cache
def sample_payloads() -> list[bytes]:
    rng = np.random.default_rng(4)
    old = rng.integers(0, 1 << 16, 4000, dtype=np.uint16)
    payloads = [b"".join(delta.encode_whole(old, compress=compress)) for compress in (False, True)]
    for share in (0.002, 0.01, 0.1, 0.4, 0.8, 1.0):
        local = np.flatnonzero(rng.random(4000) < share).astype(np.uint32)
        steps = rng.choice(np.array([1, 2, 65535, 400], np.uint16), len(local), p=[0.45, 0.05, 0.45, 0.05])
        payloads.append(b"".join(delta.encode_changes(local, old[local], old[local] + steps, 4000)))
    return payloads


def test_every_truncation_is_an_error() -> None:
    for payload in sample_payloads():
        for length in sorted({*range(0, min(len(payload), 60)), *range(60, len(payload), 97), len(payload) - 1}):
            with pytest.raises(MalformedUpdateError):
                delta.decode_run(memoryview(payload)[:length], 4000, np.dtype(np.uint16))
        with pytest.raises(MalformedUpdateError):
            delta.decode_run(memoryview(payload + b"\0"), 4000, np.dtype(np.uint16))


@settings(max_examples=300, deadline=None)
@given(which=st.integers(0, 7), flips=st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_end_in_an_error_or_in_bounds(which: int, flips: list[tuple[int, int]]) -> None:
    payload = bytearray(sample_payloads()[which])
    for position, flip in flips:
        payload[position % len(payload)] ^= flip
    try:
        decoded = delta.decode_run(memoryview(bytes(payload)), 4000, np.dtype(np.uint16))
    except MalformedUpdateError:
        return
    if decoded.values is not None:
        assert decoded.values.shape == (4000,)
    elif decoded.local is None:
        assert decoded.steps is not None
        assert decoded.steps.shape == (4000,)
    else:
        assert decoded.steps is not None
        assert len(decoded.local) == len(decoded.steps) <= 4000
        assert (np.diff(decoded.local.astype(np.int64)) > 0).all()
        assert decoded.local[-1] < 4000


def test_a_bomb_is_refused_before_it_is_inflated() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 26))
    writer = StreamWriter()
    for value in (delta.Coding.WHOLE, 1, 4000 << 1 | 1, len(bomb)):
        writer.number(int(value))
    writer.bodies.append(bomb)
    with pytest.raises(MalformedUpdateError, match="at most 4000"):
        delta.decode_run(memoryview(b"".join(writer.parts())), 4000, np.dtype(np.uint16))


def test_an_unknown_frame_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(MalformedUpdateError, match="announces"):
        inflate(frame, max_bytes=1000)
    whole = zstandard.ZstdCompressor().compress(bytes(1000))
    with pytest.raises(MalformedUpdateError):
        inflate(whole[:-2], max_bytes=1000)
    assert issubclass(TruncatedError, MalformedUpdateError)
