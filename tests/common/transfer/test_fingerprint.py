"""Laws of the fingerprint: it adds over boxes, follows from changes alone, and notices what a linear sum would not."""

import functools

import numpy as np
import pytest

from common.transfer import changes, fingerprint
from common.transfer.boxes import Box
from common.transfer.shards import TensorLayout, build_layout


def by_definition(bits: np.ndarray, row_elements: int) -> int:
    """The formula of the module, element by element in plain integers."""
    low = high = 0
    for i, x in enumerate(bits.tolist()):
        row, column = divmod(i, row_elements)
        mixed = x * (2 * x + 1)
        rows = [int(w[row]) for w in fingerprint._weight_range(0, row + 1, fingerprint._ROW_SEED)]
        columns = [int(w[column]) for w in fingerprint._weight_range(0, column + 1, fingerprint._COLUMN_SEED)]
        low += rows[0] * columns[0] * mixed
        high += rows[1] * columns[1] * mixed
    return low % 2**32 | (high % 2**32) << 32


def whole(tensor: TensorLayout, bits: np.ndarray) -> int:
    return fingerprint.of_box(tensor, Box((0,) * len(tensor.shape), tensor.shape), bits)


@pytest.mark.parametrize("shape", [(), (11,), (6, 7), (3, 4, 5), (2, 3, 2, 3), (0, 4)])
def test_it_is_the_sum_of_its_definition(shape: tuple[int, ...]) -> None:
    tensor = build_layout({"w": (shape, "float32")}).tensors[0]
    bits = np.random.default_rng(0).integers(0, 1 << 32, tensor.num_elements, dtype=np.uint32)
    assert whole(tensor, bits) == by_definition(bits, tensor.row_elements)


@pytest.mark.parametrize("shape", [(64,), (48, 32), (6, 32, 5), (3, 4, 16, 4), (2, 3, 4, 16)])
@pytest.mark.parametrize("axis", [0, -1, -2])
def test_it_adds_over_the_boxes_of_any_grid(shape: tuple[int, ...], axis: int) -> None:
    axis = axis % len(shape)
    layout = build_layout({"w": (shape, "bfloat16")}, axes_of=lambda *_: (axis,), min_run_bytes=2)
    tensor = layout.tensors[0]
    bits = np.random.default_rng(1).integers(0, 1 << 16, tensor.num_elements, dtype=np.uint16)
    parts = [fingerprint.of_box(tensor, tensor.run(r)[0], changes.gather_run(tensor, r, bits)) for r in range(tensor.num_runs)]
    assert tensor.num_runs > 1 or shape[axis] % 2
    assert functools.reduce(fingerprint.add, parts) == whole(tensor, bits)


def test_it_follows_from_the_changed_elements() -> None:
    tensor = build_layout({"w": ((300, 400), "bfloat16")}).tensors[0]
    rng = np.random.default_rng(2)
    old = rng.integers(0, 1 << 16, 120_000, dtype=np.uint16)
    new = old.copy()
    flat = np.flatnonzero(rng.random(120_000) < 0.02).astype(np.uint64)
    new[flat] += rng.integers(1, 1 << 16, len(flat), dtype=np.uint16)
    change = fingerprint.of_change(flat, old[flat], new[flat], 400)
    assert fingerprint.add(whole(tensor, old), change) == whole(tensor, new)
    assert fingerprint.subtract(whole(tensor, new), change) == whole(tensor, old)


def test_any_single_change_shows_in_both_halves() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        flat = rng.integers(0, 1 << 40, 1).astype(np.uint64)
        old, new = (rng.integers(0, 1 << 32, 1, dtype=np.uint32) for _ in range(2))
        change = fingerprint.of_change(flat, old, new, 12_345)
        assert old == new or (change & fingerprint.LOW and change >> 32)


def test_the_same_steps_from_a_drifted_base_give_another_change() -> None:
    flat = np.arange(50, dtype=np.uint64)
    old = np.random.default_rng(4).integers(0, 1 << 15, 50, dtype=np.uint16)
    honest = fingerprint.of_change(flat, old, old + np.uint16(1), 8)
    for drift in (1, 2, 256, 1 << 15):
        drifted = old.copy()
        drifted[17] ^= np.uint16(drift)
        assert fingerprint.of_change(flat, drifted, drifted + np.uint16(1), 8) != honest


def test_exchanged_elements_show() -> None:
    tensor = build_layout({"w": ((16, 16), "int8")}).tensors[0]
    bits = np.zeros(256, np.uint8)
    bits[5] = 9
    seen = {whole(tensor, np.roll(bits, shift)) for shift in range(256)}
    assert len(seen) == 256


def test_positions_beyond_the_tables_agree_with_those_inside() -> None:
    limit = fingerprint.TABLE_ENTRIES
    index = np.arange(limit - 3, limit + 3, dtype=np.uint64)
    for seed in (fingerprint._ROW_SEED, fingerprint._COLUMN_SEED):
        low, high = fingerprint._weights(index, seed)
        inside_low, inside_high = fingerprint._weight_range(limit - 3, 3, seed)
        np.testing.assert_array_equal(low[:3], inside_low)
        np.testing.assert_array_equal(high[:3], inside_high)
        np.testing.assert_array_equal(low[3:], fingerprint._weight_range(limit, 3, seed)[0])
