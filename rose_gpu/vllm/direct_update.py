"""Updates made straight from tensors in memory, for whoever drives an engine without the transfer layer: tests and benchmarks.

What comes over the transfer layer has the same form, and was verified on the way; these are taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from common.transfer.bits import flat_bits
from common.transfer.changes import find_changes, gather_run
from common.transfer.shards import WeightLayout, build_layout
from common.transfer.staging import StagedUpdate

Named = Mapping[str, np.ndarray]
LINEAGE = "direct"


def layout_of(tensors: Named) -> WeightLayout:
    return build_layout({name: (tensor.shape, tensor.dtype.name) for name, tensor in tensors.items()})


def whole_update(tensors: Named, *, version: int = 0) -> StagedUpdate:
    """All tensors of a model, to be written over anything."""
    layout = layout_of(tensors)
    update = StagedUpdate(layout, LINEAGE, None, version)
    for run in range(layout.num_runs):
        tensor_idx, run_idx = layout.locate(run)
        tensor = layout.tensors[tensor_idx]
        bits = flat_bits(np.ascontiguousarray(tensors[tensor.name]))
        update.set_all(run, gather_run(tensor, run_idx, bits).copy())
    return update


def sparse_update(old: Named, new: Named, *, base_version: int, version: int) -> StagedUpdate:
    """What changed from `old` to `new`, to be written over `old`."""
    layout = layout_of(new)
    update = StagedUpdate(layout, LINEAGE, base_version, version)
    for run in range(layout.num_runs):
        tensor_idx, run_idx = layout.locate(run)
        tensor = layout.tensors[tensor_idx]
        before, after = (flat_bits(np.ascontiguousarray(tensors[tensor.name])) for tensors in (old, new))
        changes = find_changes(tensor, run_idx, before, after)
        if len(changes.local):
            update.set_some(run, changes.local, changes.new)
    return update
