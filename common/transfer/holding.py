"""Which runs of a layout a target holds: all, or those that intersect the boxes it says it owns.

A run of which only some elements are held is fetched whole, written where it is held, and known by its checksum alone: its
fingerprint needs every element. Grids are made so that this is rare: an owner of a sixteenth has whole runs. Invariant: a target
that owns everything holds every run of every tensor it has.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from jaxtyping import UInt32

from common.transfer.boxes import Box, strided
from common.transfer.changes import all_positions
from common.transfer.errors import LayoutMismatchError
from common.transfer.shards import Bucket, TensorLayout, WeightLayout
from common.transfer.target import WeightTarget

Specs = Mapping[str, tuple[tuple[int, ...], str]]


def match_names(
    layout: WeightLayout, specs: Specs, skip_sources: Collection[str], expected_missing: Collection[str]
) -> list[str | None]:
    """For each tensor of the layout a name under which the target has it; None for those in `skip_sources`.

    Raises:
        LayoutMismatchError: a tensor without counterpart on either side, or one of another shape or dtype.
    """
    names: list[str | None] = []
    for tensor in layout.tensors:
        mine = [name for name in (tensor.name, *tensor.tied) if name in specs]
        for name in mine:
            shape, dtype = specs[name]
            if (tuple(shape), dtype) != (tensor.shape, tensor.dtype):
                raise LayoutMismatchError(f"{name} is {tensor.dtype}{list(tensor.shape)} there and {dtype}{list(shape)} here")
        if not mine and not any(name in skip_sources for name in (tensor.name, *tensor.tied)):
            raise LayoutMismatchError(f"published {tensor.name} has no counterpart here; list it in skip_sources if that is right")
        names.append(mine[0] if mine else None)
    orphans = [name for name in specs if name not in layout.by_name and name not in expected_missing]
    if orphans:
        raise LayoutMismatchError(f"nobody publishes {orphans[:5]}; list them in expected_missing if that is right")
    return names


class Holding:
    """See the module. `names` are the target's, by tensor; None for tensors that it does not have."""

    def __init__(self, layout: WeightLayout, names: Sequence[str | None], target: WeightTarget) -> None:
        self.layout, self.names = layout, names
        self._whole = np.zeros(layout.num_runs, bool)
        self._partly: dict[int, tuple[Box, ...]] = {}
        self._owned = _owned_by_name(names, target)
        for tensor_idx, (tensor, name) in enumerate(zip(layout.tensors, names, strict=True)):
            if name is None:
                continue
            first, end = layout.first_runs[tensor_idx : tensor_idx + 2]
            owned = _owned(tensor, target)
            if owned is None:
                self._whole[first:end] = True
            else:
                self._note(tensor, first, owned)

    def _note(self, tensor: TensorLayout, first: int, owned: tuple[Box, ...]) -> None:
        for run_idx in range(tensor.num_runs):
            boxes = tensor.run(run_idx)
            common = [box.intersection(mine) for box in boxes for mine in owned]
            num_held = sum(box.num_elements for box in common if box is not None)
            if num_held == sum(box.num_elements for box in boxes):
                self._whole[first + run_idx] = True
            elif num_held:
                self._partly[first + run_idx] = owned

    @functools.cached_property
    def runs(self) -> tuple[int, ...]:
        """All runs that are held wholly or partly, in order."""
        return tuple(sorted({*self._whole.nonzero()[0].tolist(), *self._partly}))

    @functools.cached_property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of the buckets that hold anything that is wanted."""
        return tuple(i for i, bucket in enumerate(self.layout.buckets) if self.wanted(bucket))

    def still_fits(self, target: WeightTarget) -> bool:
        """Whether the target owns what it did: an engine may have been loaded or sharded anew."""
        return self._owned == _owned_by_name(self.names, target)

    def is_whole(self, run: int) -> bool:
        return bool(self._whole[run])

    def holds_tensor(self, tensor_idx: int) -> bool:
        """Whether every run of a tensor is held wholly."""
        first, end = self.layout.first_runs[tensor_idx : tensor_idx + 2]
        return self.names[tensor_idx] is not None and bool(self._whole[first:end].all())

    def wanted(self, bucket: Bucket) -> frozenset[int]:
        """The runs of a bucket that are held wholly or partly."""
        return frozenset(run for run in bucket.runs if self._whole[run] or run in self._partly)

    def inside(self, run: int) -> UInt32[np.ndarray, "n"] | None:
        """Sorted positions within a run of the elements that are held; None: all."""
        if self._whole[run]:
            return None
        tensor_idx, run_idx = self.layout.locate(run)
        tensor = self.layout.tensors[tensor_idx]
        flat = all_positions(tensor, run_idx)
        held = [strided(tensor.shape, box).to_local(flat)[0] for box in self._partly.get(run, ())]
        return np.unique(np.concatenate([np.zeros(0, np.int64), *held])).astype(np.uint32)


def _owned_by_name(names: Sequence[str | None], target: WeightTarget) -> dict[str, tuple[Box, ...] | None]:
    return {name: target.owned(name) for name in names if name is not None}


def _owned(tensor: TensorLayout, target: WeightTarget) -> tuple[Box, ...] | None:
    """What the target owns of a tensor, the same under each name it has it by; boxes do not overlap."""
    specs = target.specs()
    by_name = {name: target.owned(name) for name in (tensor.name, *tensor.tied) if name in specs}
    found = {None if boxes is None else frozenset(boxes) for boxes in by_name.values()}
    if len(found) > 1:
        raise LayoutMismatchError(
            f"{' and '.join(by_name)} hold the same values, but other boxes of them are owned here: {by_name}"
        )
    owned = found.pop()
    if owned is None:
        return None
    boxes = tuple(sorted(owned, key=lambda box: box.start))
    for i, box in enumerate(boxes):
        if len(box.start) != len(tensor.shape) or any(
            start < 0 or start + n > size for start, n, size in zip(box.start, box.extent, tensor.shape, strict=False)
        ):
            raise LayoutMismatchError(f"{tensor.name}: {box} is owned here, which does not lie in {list(tensor.shape)}")
        if any(box.intersection(other) for other in boxes[:i]):
            raise LayoutMismatchError(f"{tensor.name}: boxes owned here overlap: {boxes}")
    return boxes


def check_coverage(specs: Specs, owned: Sequence[Mapping[str, Sequence[Box] | None]]) -> None:
    """Check that ranks together hold every element of every tensor.

    Args:
        owned: for each rank, by name, the boxes it owns of a tensor; None: all of it.

    Raises:
        LayoutMismatchError: names a tensor of which something is on no rank.
    """
    for name, (shape, _) in specs.items():
        parts = [of_rank[name] for of_rank in owned if name in of_rank]
        if any(boxes is None for boxes in parts):
            continue
        boxes = {box for of_rank in parts for box in of_rank or ()}
        cuts = [
            sorted({0, size, *(at for box in boxes for at in (box.start[axis], box.start[axis] + box.extent[axis]))})
            for axis, size in enumerate(shape)
        ]
        held = np.zeros([max(len(at) - 1, 0) for at in cuts], bool)
        for box in boxes:
            spans = zip(cuts, box.start, box.extent, strict=True)
            held[tuple(slice(at.index(start), at.index(start + extent)) for at, start, extent in spans)] = True
        if not held.all():
            raise LayoutMismatchError(f"{name} {list(shape)}: {int((~held).sum())} of {held.size} parts are on no rank")
