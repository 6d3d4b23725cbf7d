"""A 64-bit fingerprint of a tensor that adds over its elements, so that it follows from the changed elements alone.

Two sums modulo 2^32, kept as the low and high half of one integer; each is the sum over elements of

    row_weight(row) * column_weight(column) * mix(bits),     mix(x) = x (2 x + 1)  mod 2^32,

where flat position = row * row_elements + column. mix is a permutation of 32-bit words (the one of RC6) and the weights are odd, so
that any change of a single element changes both halves; weights that factor into row and column make whole boxes cheap. mix is not
linear, so the same difference applied to other old values shows: a receiver that has drifted is found out by the first update
that touches a drifted element. Additions of boxes, shards and updates are exact in any order. Only 32-bit arithmetic is needed,
which every accelerator has. It guards against accidents and mistakes, not against an adversary: that is the manifest's digest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Shaped, UInt32, UInt64

from common.transfer.boxes import Box
from common.transfer.shards import TensorLayout

TABLE_ENTRIES = 1 << 18
"""Rows and columns whose weights are tabulated (2 MB a table); further ones are computed."""
PIECE_ELEMENTS = 1 << 16
"""Work is done in pieces of 256 KB of 32-bit words: they stay in a core's own cache."""
LOW = (1 << 32) - 1
_ROW_SEED, _COLUMN_SEED = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def add(a: int, b: int) -> int:
    """The fingerprint of two disjoint sets of elements together."""
    return ((a + b) & LOW) | (((a >> 32) + (b >> 32)) & LOW) << 32


def subtract(a: int, b: int) -> int:
    """What remains of `a` when the elements of `b` are taken away."""
    return ((a - b) & LOW) | (((a >> 32) - (b >> 32)) & LOW) << 32


def of_change(flat: UInt64[np.ndarray, "n"], old: Shaped[np.ndarray, "n"], new: Shaped[np.ndarray, "n"], row_elements: int) -> int:
    """What to add to a tensor's fingerprint when elements at `flat` go from the bits `old` to the bits `new`."""
    row = flat // np.uint64(row_elements)
    column = flat - row * np.uint64(row_elements)
    mixed = _mix(new.astype(np.uint32))
    mixed -= _mix(old.astype(np.uint32))
    halves = []
    for row_weight, column_weight in zip(_weights(row, _ROW_SEED), _weights(column, _COLUMN_SEED), strict=True):
        np.multiply(row_weight, column_weight, out=row_weight)
        np.multiply(row_weight, mixed, out=row_weight)
        halves.append(int(np.add.reduce(row_weight, dtype=np.uint32)))
    return halves[0] | halves[1] << 32


def of_box(tensor: TensorLayout, box: Box, bits: Shaped[np.ndarray, "n"]) -> int:
    """The fingerprint of a whole box, given its elements in row-major order."""
    total, done = 0, 0
    for first_row, num_rows, column, width in _row_blocks(tensor, box):
        block = bits[done : done + num_rows * width].reshape(num_rows, width)
        total = add(total, _of_block(block, first_row, column))
        done += num_rows * width
    return total


def _row_blocks(tensor: TensorLayout, box: Box) -> Iterator[tuple[int, int, int, int]]:
    """Cut a box into (first row, number of rows, first column, width), in row-major order."""
    if box.num_elements == 0:
        return
    if not tensor.shape:
        yield 0, 1, 0, 1
        return
    column, width = box.start[-1], box.extent[-1]
    if len(tensor.shape) == 1:
        yield 0, 1, column, width
        return
    # Rows along the second-last axis are consecutive; so are those of any axes before it that the box takes whole.
    split = len(tensor.shape) - 2
    num_rows = box.extent[split]
    while split > 0 and box.extent[split] == tensor.shape[split]:
        split -= 1
        num_rows *= box.extent[split]
    inner_rows = 1
    for size in tensor.shape[split + 1 : -1]:
        inner_rows *= size
    for outer in np.ndindex(*box.extent[:split]):
        row = 0
        for axis in range(split):
            row = row * tensor.shape[axis] + box.start[axis] + outer[axis]
        yield (row * tensor.shape[split] + box.start[split]) * inner_rows, num_rows, column, width


def _of_block(block: Shaped[np.ndarray, "rows columns"], first_row: int, first_column: int) -> int:
    num_rows, width = block.shape
    total = [0, 0]
    for column in range(0, width, PIECE_ELEMENTS):
        columns = min(PIECE_ELEMENTS, width - column)
        column_weights = _weight_range(first_column + column, columns, _COLUMN_SEED)
        rows = max(1, PIECE_ELEMENTS // columns)
        for row in range(0, num_rows, rows):
            mixed = _mix(block[row : row + rows, column : column + columns].astype(np.uint32))
            row_weights = _weight_range(first_row + row, len(mixed), _ROW_SEED)
            for half in (0, 1):
                sums = np.einsum("rc,c->r", mixed, column_weights[half])
                total[half] += int(np.einsum("r,r->", sums, row_weights[half]))
    return (total[0] & LOW) | (total[1] & LOW) << 32


def _mix(words: UInt32[np.ndarray, "..."]) -> UInt32[np.ndarray, "..."]:
    """x (2 x + 1), in place."""
    other = words + words
    other += np.uint32(1)
    words *= other
    return words


def _weights(index: UInt64[np.ndarray, "n"], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two odd 32-bit weights for each row or column number, in arrays of the caller's own."""
    if index.size == 0 or int(index.max()) < TABLE_ENTRIES:
        low, high = _table(seed)
        return low.take(index.astype(np.intp)), high.take(index.astype(np.intp))
    return _hash(index, seed)


def _weight_range(first: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if first + count <= TABLE_ENTRIES:
        low, high = _table(seed)
        return low[first : first + count], high[first : first + count]
    return _hash(np.arange(first, first + count, dtype=np.uint64), seed)


@functools.cache
def _table(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return _hash(np.arange(TABLE_ENTRIES, dtype=np.uint64), seed)


def _hash(index: UInt64[np.ndarray, "n"], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """SplitMix64 (Steele, Lea, Flood 2014) of the number, cut in two odd halves."""
    z = (index + np.uint64(1)) * np.uint64(seed)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z & np.uint64(LOW)).astype(np.uint32) | np.uint32(1), (z >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
