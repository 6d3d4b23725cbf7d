"""Rectangular parts of a tensor, and where their elements lie in row-major memory. Arithmetic on shapes, no more."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Int, UInt64


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: `start` and `extent` per axis."""

    start: tuple[int, ...]
    extent: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.extent, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """What both have in common, if anything."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + m, b + n) for a, m, b, n in zip(self.start, self.extent, other.start, other.extent, strict=True))
        extent = tuple(end - first for first, end in zip(start, ends, strict=True))
        return Box(start, extent) if all(n > 0 for n in extent) else None

    def relative_to(self, outer: Box) -> Box:
        """The same box in the coordinates of an array that holds `outer` alone."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.extent)


def whole_box(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def box_of_slices(shape: tuple[int, ...], slices: tuple[slice, ...]) -> Box:
    """The box that basic slices without steps cut out of an array of this shape."""
    spans = [part.indices(size)[:2] for part, size in zip(slices, shape, strict=True)]
    return Box(tuple(start for start, _ in spans), tuple(end - start for start, end in spans))


@dataclasses.dataclass(frozen=True)
class Strided:
    """A box as row-major flat positions: `offset` plus, for each (count, stride) from outer to inner, a counter times its stride.

    The innermost stride is 1 and neighbouring axes are merged, so one pair means that the box is contiguous.
    """

    offset: int
    dims: tuple[tuple[int, int], ...]

    @property
    def contiguous(self) -> bool:
        return len(self.dims) == 1

    def to_flat(self, local: Int[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
        """Flat positions in the tensor of row-major positions within the box."""
        rest = local.astype(np.uint64)
        if self.contiguous:
            return rest + np.uint64(self.offset)
        flat = np.full(rest.shape, self.offset, np.uint64)
        for count, stride in reversed(self.dims[1:]):
            outer = rest // np.uint64(count)
            flat += (rest - outer * np.uint64(count)) * np.uint64(stride)
            rest = outer
        return flat + rest * np.uint64(self.dims[0][1])

    def to_local(self, flat: UInt64[np.ndarray, "n"]) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
        """Of flat positions in the tensor those that the box holds, as indices into `flat`, and where they are within the box."""
        rest = flat.view(np.int64) - self.offset
        inside = rest >= 0
        local = np.zeros_like(rest)
        for count, stride in self.dims:
            counter = rest if stride == 1 else rest // stride
            inside &= counter < count
            local = local * count + counter
            rest = rest - counter * stride
        here = inside.nonzero()[0]
        return here, local[here]


def strided(shape: tuple[int, ...], box: Box) -> Strided:
    """See Strided."""
    offset, stride, dims = 0, 1, [(1, 1)]
    for size, start, extent in zip(reversed(shape), reversed(box.start), reversed(box.extent), strict=True):
        offset += start * stride
        count, inner = dims[-1]
        if count * inner == stride:
            dims[-1] = (count * extent, inner)
        elif extent > 1:
            dims.append((extent, stride))
        stride *= size
    return Strided(offset, tuple(reversed(dims)))
