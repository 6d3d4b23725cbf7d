"""An update as it waits for its commit: absolute values, decoded and verified, beside the live weights and not in them.

Several updates can be staged over each other (a chain of deltas, an anchor and the deltas after it); what remains is one value for
each element that any of them touched, so that one commit takes a replica over many versions. Absolute values make a commit
repeatable: writing them twice equals writing them once.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Shaped, UInt32, UInt64

from common.transfer.changes import run_positions
from common.transfer.shards import TensorLayout, WeightLayout


@dataclasses.dataclass
class StagedRun:
    """New bits of one run: of all its elements if `local` is None, else of those at the sorted positions `local` within the run."""

    tensor: TensorLayout
    run_idx: int
    local: UInt32[np.ndarray, "n"] | None
    bits: Shaped[np.ndarray, "n"]

    def positions(self) -> UInt64[np.ndarray, "n"]:
        """Flat positions in the tensor of the elements of a run of which not all are set."""
        assert self.local is not None
        return run_positions(self.tensor, self.run_idx, self.local)


@dataclasses.dataclass
class StagedUpdate:
    """Everything to write to get from `base_version` (None: from anything) to `version`."""

    layout: WeightLayout
    lineage: str
    base_version: int | None
    version: int
    runs: dict[int, StagedRun] = dataclasses.field(default_factory=dict)
    fingerprints: dict[int, int] = dataclasses.field(default_factory=dict)
    """By run in the layout's numbering: what the run must add up to once written."""
    wire_bytes: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Where the time went: waiting for bytes, decoding, verifying."""

    @property
    def staged_elements(self) -> int:
        return sum(len(run.bits) for run in self.runs.values())

    def by_tensor(self) -> Iterator[tuple[TensorLayout, list[StagedRun]]]:
        """Runs grouped by tensor, both in the layout's order."""
        groups: dict[int, list[StagedRun]] = {}
        for run in sorted(self.runs):
            groups.setdefault(self.layout.locate(run)[0], []).append(self.runs[run])
        for tensor_idx, runs in groups.items():
            yield self.layout.tensors[tensor_idx], runs

    def current_bits(self, run: int, local: UInt32[np.ndarray, "n"], live: Callable[[], np.ndarray]) -> Shaped[np.ndarray, "n"]:
        """Bits at positions of a run as they will be after what is staged so far; `live` reads those of the live weights."""
        staged = self.runs.get(run)
        if staged is None:
            return live()
        if staged.local is None:
            return staged.bits[local]
        bits = np.array(live())
        at = np.minimum(np.searchsorted(staged.local, local), len(staged.local) - 1)
        known = staged.local[at] == local
        bits[known] = staged.bits[at[known]]
        return bits

    def all_bits(self, run: int, live: Callable[[], np.ndarray]) -> Shaped[np.ndarray, "n"]:
        """Bits of a whole run as they will be after what is staged so far; `live` reads those of the live weights. Read only."""
        staged = self.runs.get(run)
        if staged is None:
            return live()
        if staged.local is None:
            return staged.bits
        bits = np.array(live())
        bits[staged.local] = staged.bits
        return bits

    def set_some(self, run: int, local: UInt32[np.ndarray, "n"], bits: Shaped[np.ndarray, "n"]) -> None:
        """Stage new bits at some positions of a run, over what was staged before. Takes both arrays over."""
        tensor_idx, run_idx = self.layout.locate(run)
        staged = self.runs.get(run)
        if staged is None:
            self.runs[run] = StagedRun(self.layout.tensors[tensor_idx], run_idx, local, bits)
        elif staged.local is None:
            staged.bits[local] = bits
        else:
            kept = ~np.isin(staged.local, local, assume_unique=True)
            positions = np.concatenate([staged.local[kept], local])
            order = np.argsort(positions, kind="stable")
            staged.bits = np.concatenate([staged.bits[kept], bits])[order]
            staged.local = positions[order]

    def set_all(self, run: int, bits: Shaped[np.ndarray, "n"]) -> None:
        """Stage all elements of a run, over what was staged before. Takes the array over."""
        tensor_idx, run_idx = self.layout.locate(run)
        self.runs[run] = StagedRun(self.layout.tensors[tensor_idx], run_idx, None, bits)


class WholeRuns:
    """Memory for runs that are staged whole: host memory, or one unnamed file that may leave memory when that is short."""

    def __init__(self, spool_dir: Path | None) -> None:
        self._file = None if spool_dir is None else tempfile.TemporaryFile(dir=spool_dir)  # noqa: SIM115  closed with the last map
        self._end = 0

    def keep(self, values: Shaped[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        """The same values in memory of our own; an array that owns its memory is taken over."""
        if self._file is None or values.nbytes == 0:
            return values if values.flags.owndata else values.copy()
        self._file.truncate(self._end + values.nbytes)
        mapped = np.memmap(self._file, values.dtype, "r+", offset=self._end, shape=values.shape)
        mapped[:] = values
        self._end += -(-values.nbytes // 4096) * 4096
        return mapped
