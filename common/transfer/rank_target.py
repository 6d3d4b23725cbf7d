"""RankTarget: a WeightTarget that holds boxes of tensors as numpy arrays, the way one of several ranks does.

What a staged run writes into a box is worked out here, for every target that holds its part of a tensor as an array of its own. A
run may lie across the border of a box: only what is inside is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int, Shaped, UInt64

from common.transfer.bits import BITS_DTYPES, flat_bits
from common.transfer.boxes import Box, strided
from common.transfer.holding import Specs
from common.transfer.staging import StagedRun, StagedUpdate


def elements_inside(run: StagedRun, box: Box) -> tuple[Int[np.ndarray, "m"], Shaped[np.ndarray, "m"]]:
    """Positions within a box, and bits for them, of a run of which some elements are staged."""
    here, local = strided(run.tensor.shape, box).to_local(run.positions())
    return local, run.bits[here]


def write_blocks(run: StagedRun, box: Box, bits: Shaped[np.ndarray, "N"]) -> None:
    """Write what a box holds of a run that is staged whole into the box's bits."""
    done = 0
    for cut in run.tensor.run(run.run_idx):
        common = cut.intersection(box)
        if common is not None:
            block = run.bits[done : done + cut.num_elements].reshape(cut.extent)
            bits.reshape(box.extent)[common.relative_to(box).slices] = block[common.relative_to(cut).slices]
        done += cut.num_elements


def read_boxes(
    shape: tuple[int, ...], parts: Sequence[tuple[Box, Shaped[np.ndarray, "..."]]], positions: UInt64[np.ndarray, "n"], name: str
) -> Shaped[np.ndarray, "n"]:
    """Bits at flat positions of a tensor, each of which lies in one of the boxes.

    Raises:
        ValueError: a position lies in none.
    """
    bits = np.empty(len(positions), parts[0][1].dtype)
    num_found = 0
    for box, held in parts:
        here, local = strided(shape, box).to_local(positions)
        bits[here] = held.reshape(-1)[local]
        num_found += len(here)
    if num_found != len(positions):
        raise ValueError(f"{name}: {len(positions) - num_found} of {len(positions)} positions are in none of the boxes held here")
    return bits


class RankTarget:
    """See the module and common.transfer.target.WeightTarget. The arrays are written in place.

    Args:
        specs: shape of the whole tensor and dtype name, by checkpoint name.
        parts: the boxes held of each of them, and their values.
    """

    def __init__(self, specs: Specs, parts: Mapping[str, Sequence[tuple[Box, np.ndarray]]]) -> None:
        for name, boxes in parts.items():
            for box, array in boxes:
                if array.shape != box.extent or array.dtype.name != specs[name][1]:
                    raise ValueError(f"{name}: an array of {array.dtype.name}{list(array.shape)} for {box}, dtype {specs[name][1]}")
        self._specs = {name: specs[name] for name in parts}
        self._parts = {name: [(box, flat_bits(array)) for box, array in boxes] for name, boxes in parts.items()}

    def specs(self) -> Specs:
        return self._specs

    def owned(self, name: str) -> tuple[Box, ...]:
        return tuple(box for box, _ in self._parts[name])

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        return read_boxes(self._specs[name][0], self._parts[name], positions, name)

    def apply(self, update: StagedUpdate) -> None:
        """Everything is checked before the first write; writes between arrays of known size do not fail."""
        writes = [
            (run, box, bits)
            for tensor, runs in update.by_tensor()
            for name in (tensor.name, *tensor.tied)
            for box, bits in self._parts.get(name, ())
            for run in runs
        ]
        for run, _, _ in writes:
            assert run.bits.dtype == BITS_DTYPES[run.tensor.dtype]
        for run, box, bits in writes:
            if run.local is None:
                write_blocks(run, box, bits)
            else:
                local, values = elements_inside(run, box)
                bits[local] = values
