"""Where an element of the model is: (tensor, box, index within the box), in the coordinates of the Hugging Face checkpoint.

Boxes cut a tensor on a grid along the axes that a learner or a replica may shard, so that a tensor-parallel rank can fetch its own
part of a row-parallel tensor as well as of a column-parallel one. A run is a group of consecutive boxes that is encoded together:
the smallest thing a rank fetches by itself. Large enough for an entropy coder (about 1 MiB of dense weights), small enough that
one sixteenth of a large tensor is made of whole runs. A bucket is a sequence of runs of at most 64 MB of dense weights: the unit
of the pipeline, and one object in a store. Where several learner processes write one update, boxes are also cut wherever another
process's part begins, so that each run, and each bucket, is written by one of them.

Everything here is arithmetic on shapes: no array is touched, tensors may have more than 2^32 elements, and the same layout gives
the same runs and buckets on every machine. What it refuses: to know how a replica shards; that is the replica's own mapping.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from common.transfer.bits import ITEM_BYTES
from common.transfer.boxes import Box
from common.transfer.ownership import Owners, cut_units, writer_of_box

NUM_PARTS = 16
"""Tensor-parallel ranks that may want equal parts of an axis."""
MIN_RUN_BYTES = 1 << 20
"""Below this the tables of the entropy coder (some 100 bytes a run) weigh more than 2 % at 99 % unchanged."""
MIN_SPLIT_RUN_BYTES = 128 << 10
"""The same where processes of the learner cut a tensor across its runs: ranks would else fetch several times what they own."""
MAX_RUN_BYTES = 8 << 20
"""Above this a run's index arrays leave the cache, and a broken range costs too much to fetch again."""
MAX_RUN_ELEMENTS = (1 << 32) - 1
"""Positions within a run are 32 bits wide."""
BUCKET_BYTES = 64_000_000
MAX_TENSORS = 1_000_000
MAX_RUNS = 1 << 23
"""Enough for 8 TB of weights; a layout from outside with more would keep a receiver busy with counting."""
MAX_NAME_CHARS = 512
MAX_WRITERS = 1 << 16

ROW_PARALLEL_SUFFIXES = (
    "o_proj.weight",
    "down_proj.weight",
    "out_proj.weight",
    "c_proj.weight",
    "dense_4h_to_h.weight",
    "w2.weight",
)


def sharded_axes(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axis along which tensor-parallel ranks cut this tensor: inputs of row-parallel projections, else the first axis."""
    if not shape:
        return ()
    return (len(shape) - 1,) if len(shape) >= 2 and name.endswith(ROW_PARALLEL_SUFFIXES) else (0,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """One tensor's grid. Boxes are numbered along `axis_order`, its first axis slowest; those at the end of an axis may be shorter.

    `tied` lists further checkpoint names that hold the same values (an output head tied to the embedding): they travel once.
    `writers` says for each run which process writes it; empty: all by process 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box_extent: tuple[int, ...]
    axis_order: tuple[int, ...]
    boxes_per_run: int = 1
    tied: tuple[str, ...] = ()
    writers: tuple[int, ...] = ()

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def dense_bytes(self) -> int:
        return self.num_elements * ITEM_BYTES[self.dtype]

    @property
    def row_elements(self) -> int:
        """Length of the last axis: flat position = row * row_elements + column."""
        return self.shape[-1] if self.shape else 1

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(-(-size // extent) if size else 0 for size, extent in zip(self.shape, self.box_extent, strict=True))

    @functools.cached_property
    def num_boxes(self) -> int:
        return math.prod(self.grid)

    @functools.cached_property
    def num_runs(self) -> int:
        return -(-self.num_boxes // self.boxes_per_run)

    def box(self, box_idx: int) -> Box:
        if not 0 <= box_idx < self.num_boxes:
            raise IndexError(f"box {box_idx} of {self.name}, which has {self.num_boxes}")
        start, extent = [0] * len(self.shape), [1] * len(self.shape)
        for axis in reversed(self.axis_order):
            box_idx, cell = divmod(box_idx, self.grid[axis])
            start[axis] = cell * self.box_extent[axis]
            extent[axis] = min(self.box_extent[axis], self.shape[axis] - start[axis])
        return Box(tuple(start), tuple(extent))

    def run(self, run_idx: int) -> tuple[Box, ...]:
        """The boxes of a run, in the order in which their elements are concatenated."""
        if not 0 <= run_idx < self.num_runs:
            raise IndexError(f"run {run_idx} of {self.name}, which has {self.num_runs}")
        first = run_idx * self.boxes_per_run
        return tuple(self.box(i) for i in range(first, min(first + self.boxes_per_run, self.num_boxes)))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Ascending runs of one writer, in the layout's own numbering, which goes through the tensors in order."""

    runs: Sequence[int]
    dense_bytes: int
    writer: int = 0


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """All tensors of a model in the order in which they travel. Two sides with the same digest agree on every address."""

    tensors: tuple[TensorLayout, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, TensorLayout]:
        """Tensors by checkpoint name, tied names included."""
        return {name: tensor for tensor in self.tensors for name in (tensor.name, *tensor.tied)}

    @functools.cached_property
    def dense_bytes(self) -> int:
        return sum(tensor.dense_bytes for tensor in self.tensors)

    @functools.cached_property
    def first_runs(self) -> list[int]:
        """Number of the first run of each tensor, and at the end the number of runs in all."""
        return list(itertools.accumulate((tensor.num_runs for tensor in self.tensors), initial=0))

    @property
    def num_runs(self) -> int:
        return self.first_runs[-1]

    def locate(self, run: int) -> tuple[int, int]:
        """(tensor index, run within that tensor) of a run in the layout's numbering."""
        if not 0 <= run < self.num_runs:
            raise IndexError(f"run {run} of {self.num_runs}")
        tensor_idx = bisect.bisect_right(self.first_runs, run) - 1
        return tensor_idx, run - self.first_runs[tensor_idx]

    def run_bytes(self, run: int) -> int:
        tensor_idx, run_idx = self.locate(run)
        tensor = self.tensors[tensor_idx]
        return sum(box.num_elements for box in tensor.run(run_idx)) * ITEM_BYTES[tensor.dtype]

    @functools.cached_property
    def num_writers(self) -> int:
        return 1 + max((writer for tensor in self.tensors for writer in tensor.writers), default=0)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they are fetched: where there are several writers, the first of each, the second of each, ..."""
        if self.num_writers == 1:
            return tuple(self._buckets_of(range(self.num_runs), 0))
        runs: list[list[int]] = [[] for _ in range(self.num_writers)]
        for tensor, first in zip(self.tensors, self.first_runs, strict=False):
            for run_idx in range(tensor.num_runs):
                runs[tensor.writers[run_idx] if tensor.writers else 0].append(first + run_idx)
        by_writer = [self._buckets_of(of_writer, writer) for writer, of_writer in enumerate(runs)]
        rounds = itertools.zip_longest(*by_writer)
        return tuple(bucket for round_ in rounds for bucket in round_ if bucket is not None)

    def _buckets_of(self, runs: Sequence[int], writer: int) -> Iterator[Bucket]:
        first, size = 0, 0
        for i, run in enumerate(runs):
            run_bytes = self.run_bytes(run)
            if size and size + run_bytes > BUCKET_BYTES:
                yield Bucket(runs[first:i], size, writer)
                first, size = i, 0
            size += run_bytes
        if first < len(runs):
            yield Bucket(runs[first:], size, writer)

    @functools.cached_property
    def json_bytes(self) -> bytes:
        rows = [
            [t.name, t.dtype, t.shape, t.box_extent, t.axis_order, t.boxes_per_run, t.tied, *([t.writers] if t.writers else [])]
            for t in self.tensors
        ]
        return json.dumps(rows, separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.json_bytes).hexdigest()[:32]


def build_layout(
    specs: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    tied: Mapping[str, str] | None = None,
    axes_of: Callable[[str, tuple[int, ...]], Sequence[int]] = sharded_axes,
    min_run_bytes: int = MIN_RUN_BYTES,
    max_run_bytes: int = MAX_RUN_BYTES,
    owners: Mapping[str, Owners] | None = None,
) -> WeightLayout:
    """Lay out a model.

    Args:
        specs: checkpoint name -> (shape, dtype name), in the order in which tensors travel.
        tied: name -> the name in `specs` whose values it shares; such a name must not be in `specs`.
        axes_of: the axes along which either side may cut a tensor; the first is what replicas cut and what runs follow.
        min_run_bytes: an axis is cut into fewer than NUM_PARTS parts where runs would be smaller than this.
        owners: by name, which boxes each of several writers publishes; tensors left out are written by process 0.
    """
    tied = tied or {}
    for alias, name in tied.items():
        if alias in specs or name not in specs:
            raise ValueError(f"tied name {alias!r} must not be a tensor of its own, and {name!r} must be one")
    tensors = []
    for name, (shape, dtype) in specs.items():
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype} cannot travel; use one of {', '.join(ITEM_BYTES)}")
        tensor = TensorLayout(
            name=name,
            dtype=dtype,
            shape=tuple(shape),
            box_extent=tuple(max(size, 1) for size in shape),
            axis_order=tuple(range(len(shape))),
            tied=tuple(alias for alias, target in tied.items() if target == name),
        )
        of_tensor = (owners or {}).get(name, ())
        tensors.append(_on_grid(tensor, tuple(axes_of(name, shape)), of_tensor, min_run_bytes, max_run_bytes))
    return WeightLayout(tuple(tensors))


def _on_grid(tensor: TensorLayout, axes: tuple[int, ...], owners: Owners, min_bytes: int, max_bytes: int) -> TensorLayout:
    """The tensor with its grid: runs follow the first of `axes`; axes that only owners cut come next, so that no run has two."""
    shape = tensor.shape
    if not tensor.num_elements or not shape:
        return dataclasses.replace(tensor, writers=(owners[0][1],) if tensor.num_runs and owners and owners[0][1] else ())
    if axes and tensor.dense_bytes // shape[axes[0]] > max_bytes:
        axes = (max(range(len(shape)), key=lambda axis: shape[axis]), *axes)  # one slice alone would be too large a run
    units = cut_units(shape, owners, tensor.name)
    owned_axes = tuple(axis for axis, unit in enumerate(units) if unit < shape[axis])
    main, *others = tuple(dict.fromkeys((*axes, *owned_axes))) or (0,)
    split = tuple(axis for axis in others if axis in owned_axes)
    joined = tuple(axis for axis in others if axis not in owned_axes)
    extent = list(shape)
    for axis in split:
        extent[axis] = units[axis]
    for axis in joined:
        extent[axis] = shape[axis] // math.gcd(shape[axis], NUM_PARTS)
    part_bytes = tensor.dense_bytes // math.prod(shape[axis] // units[axis] for axis in split)
    min_bytes = min(min_bytes, MIN_SPLIT_RUN_BYTES) if split else min_bytes
    if axes or owned_axes:
        extent[main] = _step(shape[main], units[main], part_bytes, min_bytes, max_bytes)
    order = (main, *split, *joined)
    tensor = dataclasses.replace(
        tensor,
        box_extent=tuple(extent),
        axis_order=order + tuple(axis for axis in range(len(shape)) if axis not in order),
        boxes_per_run=math.prod(shape[axis] // extent[axis] for axis in joined),
    )
    writers = tuple(writer_of_box(tensor.run(run_idx)[0], owners) for run_idx in range(tensor.num_runs)) if owners else ()
    return dataclasses.replace(tensor, writers=writers if any(writers) else ())


def _step(size: int, unit: int, dense_bytes: int, min_bytes: int, max_bytes: int) -> int:
    """How far apart an axis of `size` is cut: one of NUM_PARTS equal parts, or fewer where those are small, or parts of a part;
    always a divisor of `unit` where that is less than the axis."""
    parts = math.gcd(size, NUM_PARTS)
    while parts > 1 and dense_bytes // parts < min_bytes:
        parts //= 2
    step = math.gcd(size // parts, unit)
    step_bytes = dense_bytes * step // size
    if step_bytes <= max_bytes:
        return step
    fewest = -(-step_bytes // max_bytes)
    for pieces in (*range(fewest, 4 * fewest + 1), *range(fewest - 1, fewest // 2, -1)):
        if step % pieces == 0:
            return step // pieces
    if unit < size:
        return next((step // pieces for pieces in range(fewest, step) if step % pieces == 0), 1)
    return max(step // fewest, 1)
