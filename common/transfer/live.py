"""Fingerprints of the weights that a target holds right now, computed from every element: slow, and the last word."""

from __future__ import annotations

from common.transfer.changes import all_positions
from common.transfer.encoder import fingerprint_run
from common.transfer.holding import Holding
from common.transfer.target import WeightTarget


def live_fingerprints(holding: Holding, target: WeightTarget) -> dict[int, int]:
    """The fingerprint of every run that the target holds wholly, by run in the layout's numbering. Reads a run at a time."""
    found: dict[int, int] = {}
    for run in holding.runs:
        tensor_idx, run_idx = holding.layout.locate(run)
        tensor, name = holding.layout.tensors[tensor_idx], holding.names[tensor_idx]
        if name is not None and holding.is_whole(run):
            found[run] = fingerprint_run(tensor, run_idx, target.read(name, all_positions(tensor, run_idx)))
    return found
