"""Fingerprints of the weights that a target holds right now, computed from every element: slow, and the last word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.transfer import fingerprint
from common.transfer.changes import all_positions
from common.transfer.encoder import fingerprint_run
from common.transfer.shards import WeightLayout
from common.transfer.target import WeightTarget


def live_fingerprints(layout: WeightLayout, names: Sequence[str | None], target: WeightTarget) -> dict[int, int]:
    """The fingerprint of every run that the target holds, by run in the layout's numbering. Reads a run at a time."""
    found: dict[int, int] = {}
    for run in range(layout.num_runs):
        tensor_idx, run_idx = layout.locate(run)
        tensor, name = layout.tensors[tensor_idx], names[tensor_idx]
        if name is not None:
            found[run] = fingerprint_run(tensor, run_idx, target.read(name, all_positions(tensor, run_idx)))
    return found


def matches(layout: WeightLayout, names: Sequence[str | None], found: Mapping[int, int], expected: Mapping[int, int]) -> bool:
    """Whether the runs of every tensor held here add up to the tensor's fingerprint in an anchor's manifest."""
    for tensor_idx in range(len(layout.tensors)):
        first, end = layout.first_runs[tensor_idx : tensor_idx + 2]
        if names[tensor_idx] is None or first == end:
            continue
        total = 0
        for run in range(first, end):
            total = fingerprint.add(total, found[run])
        if total != expected.get(tensor_idx):
            return False
    return True
