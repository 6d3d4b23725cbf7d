"""Which of several learner processes publishes which part of a tensor: disjoint boxes that cover it, each with its writer.

Every process derives the same owners from the shardings of all processes, so that nobody has to be asked, and publishes its own
boxes alone; what several processes hold is published once. Refuses boxes that overlap or leave something out: a tensor would travel
twice or not at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from common.transfer.boxes import Box

Owners = Sequence[tuple[Box, int]]
"""(box, number of its writer); empty: all of it is process 0's."""


def cut_units(shape: tuple[int, ...], owners: Owners, name: str) -> tuple[int, ...]:
    """For each axis the largest step such that no border between two boxes lies within a step; the axis's size where none cuts it.

    Raises:
        ValueError: the boxes overlap or do not cover the tensor.
    """
    if not owners:
        return shape
    cuts, cells = _cells(shape, owners, name)
    return tuple(
        math.gcd(size, *(at for i, at in enumerate(cuts[axis][1:-1], start=1) if _differs(cells, axis, i)))
        for axis, size in enumerate(shape)
    )


def merged(shape: tuple[int, ...], owners: Owners, name: str) -> Owners:
    """The same owners with as few boxes as possible: one for each writer whose part is a box, else the boxes given."""
    _cells(shape, owners, name)
    result: list[tuple[Box, int]] = []
    ordered = sorted(owners, key=lambda owner: (owner[1], owner[0].start))
    for writer, group in itertools.groupby(ordered, key=lambda owner: owner[1]):
        boxes = [box for box, _ in group]
        start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
        ends = zip(*((a + n for a, n in zip(box.start, box.extent, strict=True)) for box in boxes), strict=True)
        hull = Box(start, tuple(max(end) - first for end, first in zip(ends, start, strict=True)))
        fills = hull.num_elements == sum(box.num_elements for box in boxes)
        result += [(hull, writer)] if fills else [(box, writer) for box in boxes]
    return tuple(result)


def writer_of_box(box: Box, owners: Owners) -> int:
    """The writer of a box that no border cuts."""
    return next(writer for owned, writer in owners if owned.intersection(box) is not None)


def _cells(shape: tuple[int, ...], owners: Owners, name: str) -> tuple[list[list[int]], Int[np.ndarray, "..."]]:
    """Where the boxes' borders cut each axis, and for each cell between cuts which of the boxes it lies in."""
    cuts = [
        sorted({0, size, *(at for box, _ in owners for at in (box.start[axis], box.start[axis] + box.extent[axis]))})
        for axis, size in enumerate(shape)
    ]
    cells = np.full([len(at) - 1 for at in cuts], -1)
    for i, (box, _) in enumerate(owners):
        where = tuple(
            slice(at.index(start), at.index(start + extent)) for at, start, extent in zip(cuts, box.start, box.extent, strict=True)
        )
        if (cells[where] >= 0).any():
            raise ValueError(f"{name}: two processes would publish part of {box}; each box needs one writer")
        cells[where] = i
    if (cells < 0).any():
        left = int((cells < 0).sum())
        raise ValueError(f"{name} {list(shape)}: the boxes of all processes leave {left} of {cells.size} parts out")
    return cuts, cells


def _differs(cells: Int[np.ndarray, "..."], axis: int, i: int) -> bool:
    return bool((cells.take(i - 1, axis) != cells.take(i, axis)).any())
