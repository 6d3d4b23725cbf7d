"""Which elements of a run changed, and from what to what. One pass over both versions at memory speed, nothing else.

Words of 64 bits are compared first and only those that differ are looked into: at 99 % unchanged 4 % of the words. Where most
words differ, elements are compared at once. Positions are sorted within each box, and boxes follow each other in the run's order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Shaped, UInt32, UInt64

from common.transfer.boxes import Strided, strided
from common.transfer.shards import TensorLayout

PIECE_WORDS = 1 << 17
"""1 MiB of either version is compared at a time: the result stays in cache until it is read."""
DENSE_SHARE = 0.25
"""Above this share of differing words the second look costs more than comparing elements at once."""
_PROBES = 16
_PROBE_ELEMENTS = 256


@dataclasses.dataclass(frozen=True)
class Changes:
    """n changed elements: position within the run, position in the tensor, bits before and after."""

    local: UInt32[np.ndarray, "n"]
    flat: UInt64[np.ndarray, "n"]
    old: Shaped[np.ndarray, "n"]
    new: Shaped[np.ndarray, "n"]


def find_changes(tensor: TensorLayout, run_idx: int, old: Shaped[np.ndarray, "N"], new: Shaped[np.ndarray, "N"]) -> Changes:
    """The changed elements of a run, given all bits of its tensor, flat, in both versions."""
    parts: list[Changes] = []
    before = 0
    for box in tensor.run(run_idx):
        parts.append(_box_changes(strided(tensor.shape, box), old, new, before))
        before += box.num_elements
    if len(parts) == 1:
        return parts[0]
    return Changes(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in dataclasses.fields(Changes)))


def gather_run(tensor: TensorLayout, run_idx: int, bits: Shaped[np.ndarray, "N"]) -> Shaped[np.ndarray, "n"]:
    """All elements of a run in its order: a view where the run is one contiguous box, else a copy."""
    parts = [_view(strided(tensor.shape, box), bits).reshape(-1) for box in tensor.run(run_idx)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def scatter_run(tensor: TensorLayout, run_idx: int, values: Shaped[np.ndarray, "n"], bits: Shaped[np.ndarray, "N"]) -> None:
    """The inverse of gather_run: write a run's elements into its tensor's bits."""
    done = 0
    for box in tensor.run(run_idx):
        view = _view(strided(tensor.shape, box), bits)
        np.copyto(view, values[done : done + view.size].reshape(view.shape))
        done += view.size


def copy_run(tensor: TensorLayout, run_idx: int, source: Shaped[np.ndarray, "N"], target: Shaped[np.ndarray, "N"]) -> None:
    """Copy a run's elements from one version of its tensor's bits to another, box by box without a copy in between."""
    for box in tensor.run(run_idx):
        where = strided(tensor.shape, box)
        np.copyto(_view(where, target), _view(where, source))


def estimate_density(tensor: TensorLayout, run_idx: int, old: Shaped[np.ndarray, "N"], new: Shaped[np.ndarray, "N"]) -> float:
    """Share of changed elements from a sample of the run: precise enough to choose an encoding, and nearly free."""
    changed, seen = 0, 0
    boxes = tensor.run(run_idx)
    for box in boxes:
        where = strided(tensor.shape, box)
        count = box.num_elements
        starts = range(0, count, max(_PROBE_ELEMENTS, count * len(boxes) // _PROBES))
        probes = np.concatenate([np.arange(start, min(start + _PROBE_ELEMENTS, count)) for start in starts])
        flat = where.to_flat(probes)
        changed += int(np.count_nonzero(old[flat] != new[flat]))
        seen += len(probes)
    return changed / max(seen, 1)


def _box_changes(where: Strided, old: np.ndarray, new: np.ndarray, before: int) -> Changes:
    lanes = 8 // old.itemsize
    words = _in_words(where, lanes, old.size)
    if words is None:
        return _element_changes(where, old, new, before)
    old_words, new_words = old.view(np.uint64), new.view(np.uint64)
    found: list[np.ndarray] = []
    for start, differs in _compare(_view(words, old_words), _view(words, new_words)):
        hits = differs.nonzero()[0]
        if not found and len(hits) > DENSE_SHARE * differs.size:
            return _element_changes(where, old, new, before)
        found.append(hits + start)
    word = found[0] if len(found) == 1 else np.concatenate(found)
    word_flat = words.to_flat(word)
    gather = word_flat.view(np.int64)  # numpy indexes by int64 without a conversion
    old_lanes, new_lanes = old_words.take(gather).view(old.dtype), new_words.take(gather).view(old.dtype)
    hit = (old_lanes != new_lanes).nonzero()[0]
    in_word, lane = hit >> (lanes.bit_length() - 1), hit & (lanes - 1)
    local = (word.take(in_word) * lanes + (lane + before)).astype(np.uint32)
    flat = word_flat.take(in_word) * np.uint64(lanes) + lane.view(np.uint64)
    return Changes(local, flat, old_lanes.take(hit), new_lanes.take(hit))


def _element_changes(where: Strided, old: np.ndarray, new: np.ndarray, before: int) -> Changes:
    found = [differs.nonzero()[0] + start for start, differs in _compare(_view(where, old), _view(where, new))]
    local = found[0] if len(found) == 1 else np.concatenate(found) if found else np.zeros(0, np.int64)
    flat = where.to_flat(local)
    gather = flat.view(np.int64)
    return Changes((local + before).astype(np.uint32), flat, old.take(gather), new.take(gather))


def _in_words(where: Strided, lanes: int, size: int) -> Strided | None:
    """The same box in words of `lanes` elements, if it is made of whole words."""
    *outer, (count, _) = where.dims
    if lanes == 1 or size % lanes or where.offset % lanes or count % lanes or any(stride % lanes for _, stride in outer):
        return None
    return Strided(where.offset // lanes, (*((n, stride // lanes) for n, stride in outer), (count // lanes, 1)))


def _view(where: Strided, flat: np.ndarray) -> np.ndarray:
    """The box as an array that shares the tensor's memory."""
    assert flat.flags.c_contiguous
    shape = tuple(count for count, _ in where.dims)
    strides = tuple(stride * flat.itemsize for _, stride in where.dims)
    return np.lib.stride_tricks.as_strided(flat[where.offset :], shape, strides)


def _compare(old: np.ndarray, new: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(position of its first element, flat mask of what differs) for piece after piece of two equal-shaped views.

    A mask is valid until the next one is asked for.
    """
    inner = old[0].size if len(old) else 1
    rows = max(1, PIECE_WORDS // max(inner, 1))
    buffer = np.empty((min(rows, len(old)), *old.shape[1:]), bool)
    for start in range(0, len(old), rows):
        a, b = old[start : start + rows], new[start : start + rows]
        yield start * inner, np.not_equal(a, b, out=buffer[: len(a)]).reshape(-1)


def all_positions(tensor: TensorLayout, run_idx: int) -> UInt64[np.ndarray, "n"]:
    """Positions in the tensor of all elements of a run, in its order."""
    grids = [(strided(tensor.shape, box), box.num_elements) for box in tensor.run(run_idx)]
    parts = [
        np.arange(grid.offset, grid.offset + count, dtype=np.uint64) if grid.contiguous else grid.to_flat(np.arange(count))
        for grid, count in grids
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def run_positions(tensor: TensorLayout, run_idx: int, local: UInt32[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """Positions in the tensor of sorted positions within a run."""
    boxes = tensor.run(run_idx)
    if len(boxes) == 1:
        return strided(tensor.shape, boxes[0]).to_flat(local)
    ends = np.cumsum([box.num_elements for box in boxes])
    cuts = np.searchsorted(local, ends)
    starts = ends - [box.num_elements for box in boxes]
    pieces = np.split(local, cuts[:-1])
    return np.concatenate(
        [
            strided(tensor.shape, box).to_flat(piece - np.uint32(start))
            for box, piece, start in zip(boxes, pieces, starts, strict=True)
        ]
    )
