"""A layout as it travels: parsing what WeightLayout.json_bytes wrote, from whoever sent it.

Refuses anything that build_layout could not have made, before memory is taken for it.
"""

from __future__ import annotations

import json
import math

from common.transfer.bits import ITEM_BYTES
from common.transfer.errors import MalformedUpdateError
from common.transfer.shards import MAX_NAME_CHARS, MAX_RUN_ELEMENTS, MAX_RUNS, MAX_TENSORS, MAX_WRITERS, TensorLayout, WeightLayout


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
    if not isinstance(row, list) or len(row) not in (7, 8):
        raise ValueError("a tensor is [name, dtype, shape, box extent, axis order, boxes per run, tied names] and perhaps writers")
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
    writers = _small_ints(row[7], MAX_RUNS) if len(row) == 8 else ()
    tensor = TensorLayout(
        name=name,
        dtype=dtype,
        shape=shape,
        box_extent=box_extent,
        axis_order=axis_order,
        boxes_per_run=boxes_per_run,
        tied=tuple(tied),
        writers=writers,
    )
    if len(row) == 8 and (len(writers) != tensor.num_runs or not 0 < max(writers) < MAX_WRITERS):
        raise ValueError(f"{name}: {len(writers)} writers for {tensor.num_runs} runs, or numbers of writers above {MAX_WRITERS}")
    return tensor


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.isprintable()


def _small_ints(values: object, max_values: int = 16) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > max_values or not all(type(v) is int and 0 <= v < 1 << 48 for v in values):
        raise ValueError(f"{values!r:.80} is not a list of sizes")
    return tuple(values)
