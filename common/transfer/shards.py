"""Where an element of the model is: (tensor, box, index within the box), in the coordinates of the Hugging Face checkpoint.

Boxes cut a tensor on a grid along the axes that a learner or a replica may shard, so that a tensor-parallel rank can fetch its own
part of a row-parallel tensor as well as of a column-parallel one. A run is a group of consecutive boxes that is encoded together:
the smallest thing a rank fetches by itself. Large enough for an entropy coder (about 1 MiB of dense weights), small enough that
one sixteenth of a large tensor is made of whole runs. A bucket is a sequence of runs of at most 64 MB of dense weights: the unit
of the pipeline, and one object in a store.

Everything here is arithmetic on shapes: no array is touched, tensors may have more than 2^32 elements, and the same layout gives
the same runs and buckets on every machine. What it refuses: to know how either side shards; that is each side's own mapping.
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

import numpy as np
from jaxtyping import Int, UInt64

from common.transfer.bits import ITEM_BYTES
from common.transfer.errors import MalformedUpdateError

NUM_PARTS = 16
"""Tensor-parallel ranks that may want equal parts of an axis."""
MIN_RUN_BYTES = 1 << 20
"""Below this the tables of the entropy coder (some 100 bytes a run) weigh more than 2 % at 99 % unchanged."""
MAX_RUN_BYTES = 8 << 20
"""Above this a run's index arrays leave the cache, and a broken range costs too much to fetch again."""
MAX_RUN_ELEMENTS = (1 << 32) - 1
"""Positions within a run are 32 bits wide."""
BUCKET_BYTES = 64_000_000
MAX_TENSORS = 1_000_000
MAX_RUNS = 1 << 23
"""Enough for 8 TB of weights; a layout from outside with more would keep a receiver busy with counting."""
MAX_NAME_CHARS = 512

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """One tensor's grid. Boxes are numbered along `axis_order`, its first axis slowest; those at the end of an axis may be shorter.

    `tied` lists further checkpoint names that hold the same values (an output head tied to the embedding): they travel once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    box_extent: tuple[int, ...]
    axis_order: tuple[int, ...]
    boxes_per_run: int = 1
    tied: tuple[str, ...] = ()

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
    """Runs [first_run, end_run) in the layout's own numbering, which goes through the tensors in order."""

    first_run: int
    end_run: int
    dense_bytes: int


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
    def buckets(self) -> tuple[Bucket, ...]:
        return tuple(self._buckets())

    def _buckets(self) -> Iterator[Bucket]:
        first, size = 0, 0
        for run in range(self.num_runs):
            run_bytes = self.run_bytes(run)
            if size and size + run_bytes > BUCKET_BYTES:
                yield Bucket(first, run, size)
                first, size = run, 0
            size += run_bytes
        if first < self.num_runs:
            yield Bucket(first, self.num_runs, size)

    @functools.cached_property
    def json_bytes(self) -> bytes:
        rows = [[t.name, t.dtype, t.shape, t.box_extent, t.axis_order, t.boxes_per_run, t.tied] for t in self.tensors]
        return json.dumps(rows, separators=(",", ":")).encode()

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.json_bytes).hexdigest()[:32]


def parse_layout(payload: bytes) -> WeightLayout:
    """The inverse of WeightLayout.json_bytes, for bytes from outside.

    Raises:
        MalformedUpdateError: anything that build_layout could not have made.
    """
    try:
        rows = json.loads(payload)
        if not isinstance(rows, list) or len(rows) > MAX_TENSORS:
            raise ValueError(f"expected a list of at most {MAX_TENSORS} tensors")
        layout = WeightLayout(tuple(_parse_tensor(row) for row in rows))
    except (ValueError, TypeError, KeyError, RecursionError) as e:
        raise MalformedUpdateError(f"layout: {e}") from None
    if len(layout.by_name) != sum(1 + len(t.tied) for t in layout.tensors):
        raise MalformedUpdateError("layout: a tensor name occurs twice")
    if layout.num_runs > MAX_RUNS:
        raise MalformedUpdateError(f"layout: {layout.num_runs} runs, at most {MAX_RUNS} are allowed")
    for tensor in layout.tensors:
        if math.prod(tensor.box_extent) * min(tensor.boxes_per_run, max(tensor.num_boxes, 1)) > MAX_RUN_ELEMENTS:
            raise MalformedUpdateError(f"layout: a run of {tensor.name} has more than {MAX_RUN_ELEMENTS} elements")
    return layout


def _parse_tensor(row: object) -> TensorLayout:
    if not isinstance(row, list) or len(row) != 7:
        raise ValueError("a tensor is [name, dtype, shape, box extent, axis order, boxes per run, tied names]")
    name, dtype, boxes_per_run = row[0], row[1], row[5]
    shape, box_extent, axis_order = (_small_ints(x) for x in row[2:5])
    tied = row[6]
    if not isinstance(tied, list) or not all(_is_name(x) for x in (name, *tied)):
        raise ValueError(f"{name!r:.80} is not a tensor name")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: dtype {dtype!r:.40} is none of {', '.join(ITEM_BYTES)}")
    if not (len(shape) == len(box_extent) == len(axis_order)) or sorted(axis_order) != list(range(len(shape))):
        raise ValueError(f"{name}: shape {shape}, box {box_extent} and axis order {axis_order} do not fit together")
    if not all(1 <= extent <= max(size, 1) for size, extent in zip(shape, box_extent, strict=True)):
        raise ValueError(f"{name}: box {box_extent} does not fit shape {shape}")
    if type(boxes_per_run) is not int or not 1 <= boxes_per_run < 1 << 32 or math.prod(shape) >= 1 << 56:
        raise ValueError(f"{name}: {boxes_per_run!r:.40} boxes a run, or too many elements")
    return TensorLayout(
        name=name,
        dtype=dtype,
        shape=shape,
        box_extent=box_extent,
        axis_order=axis_order,
        boxes_per_run=boxes_per_run,
        tied=tuple(tied),
    )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _small_ints(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > 16 or not all(type(v) is int and 0 <= v < 1 << 48 for v in values):
        raise ValueError(f"{values!r:.80} is not a list of sizes")
    return tuple(values)


def build_layout(
    specs: Mapping[str, tuple[tuple[int, ...], str]],
    *,
    tied: Mapping[str, str] | None = None,
    axes_of: Callable[[str, tuple[int, ...]], Sequence[int]] = sharded_axes,
    min_run_bytes: int = MIN_RUN_BYTES,
    max_run_bytes: int = MAX_RUN_BYTES,
) -> WeightLayout:
    """Lay out a model.

    Args:
        specs: checkpoint name -> (shape, dtype name), in the order in which tensors travel.
        tied: name -> the name in `specs` whose values it shares; such a name must not be in `specs`.
        axes_of: the axes along which either side may cut a tensor; the first is what replicas cut and what runs follow.
        min_run_bytes: an axis is cut into fewer than NUM_PARTS parts where runs would be smaller than this.
    """
    tied = tied or {}
    for alias, name in tied.items():
        if alias in specs or name not in specs:
            raise ValueError(f"tied name {alias!r} must not be a tensor of its own, and {name!r} must be one")
    tensors = []
    for name, (shape, dtype) in specs.items():
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{name}: dtype {dtype} cannot travel; use one of {', '.join(ITEM_BYTES)}")
        aliases = tuple(alias for alias, target in tied.items() if target == name)
        tensors.append(
            _tensor_layout(name, tuple(shape), dtype, tuple(axes_of(name, shape)), aliases, min_run_bytes, max_run_bytes)
        )
    return WeightLayout(tuple(tensors))


def _tensor_layout(
    name: str, shape: tuple[int, ...], dtype: str, axes: tuple[int, ...], tied: tuple[str, ...], min_bytes: int, max_bytes: int
) -> TensorLayout:
    if axes and math.prod(shape) // max(shape[axes[0]], 1) * ITEM_BYTES[dtype] > max_bytes:
        axes = (max(range(len(shape)), key=lambda axis: shape[axis]), *axes)  # one slice alone would be too large a run
    axes = tuple(dict.fromkeys(axes))
    order = axes + tuple(axis for axis in range(len(shape)) if axis not in axes)
    extent = [max(size, 1) for size in shape]
    boxes_per_run = 1
    dense_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if axes and dense_bytes:
        main = axes[0]
        extent[main] = _step(shape[main], dense_bytes, min_bytes, max_bytes)
        for axis in axes[1:]:
            extent[axis] = shape[axis] // math.gcd(shape[axis], NUM_PARTS)
            boxes_per_run *= shape[axis] // extent[axis]
    return TensorLayout(
        name=name, dtype=dtype, shape=shape, box_extent=tuple(extent), axis_order=order, boxes_per_run=boxes_per_run, tied=tied
    )


def _step(size: int, dense_bytes: int, min_bytes: int, max_bytes: int) -> int:
    """How far apart an axis of `size` is cut: one of NUM_PARTS equal parts, or fewer where those are small, or parts of a part."""
    parts = math.gcd(size, NUM_PARTS)
    while parts > 1 and dense_bytes // parts < min_bytes:
        parts //= 2
    step, step_bytes = size // parts, dense_bytes // parts
    if step_bytes <= max_bytes:
        return step
    fewest = -(-step_bytes // max_bytes)
    for pieces in (*range(fewest, 4 * fewest + 1), *range(fewest - 1, fewest // 2, -1)):
        if step % pieces == 0:
            return step // pieces
    return max(step // fewest, 1)
