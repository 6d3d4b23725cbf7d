"""WeightTarget: what a subscriber needs of whoever holds live weights, and one that holds numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Shaped, UInt64

from common.transfer.bits import flat_bits
from common.transfer.boxes import Box
from common.transfer.changes import scatter_run
from common.transfer.shards import TensorLayout
from common.transfer.staging import StagedRun, StagedUpdate


class WeightTarget(Protocol):
    """Live weights by checkpoint name. Its own layout (fused, transposed, sharded parameters) is its own affair."""

    def specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape (of the whole tensor) and dtype name of every parameter, under each checkpoint name it is used by; no buffers or
        scratch tensors."""
        ...

    def owned(self, name: str) -> tuple[Box, ...] | None:
        """The boxes of a tensor that are held here, for one rank of several; None: all of it. Boxes do not overlap."""
        ...

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        """Bit patterns of the live values at flat positions in the whole tensor, all of them owned; valid until the next commit.
        Called from any thread while serving, never during a commit."""
        ...

    def apply(self, update: StagedUpdate) -> None:
        """Write what is owned of an update's values, those of tied tensors to every use. Called between two steps; again changes
        nothing.

        If it raises, the weights are as they were before.
        """
        ...


@runtime_checkable
class SlicedTarget(WeightTarget, Protocol):
    """A target that can write an update in pieces, between which the device is free for other engines."""

    def apply_in_slices(self, update: StagedUpdate) -> Iterator[None]:
        """`apply`, yielding between pieces. Takes effect at the end; closed before, it leaves the weights as they were."""
        ...


class NumpyTarget:
    """A WeightTarget over C-contiguous arrays, written in place: whoever else holds them sees the new values."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Names that share one array (tied tensors) may be given both, or only one of them."""
        self._specs = {name: (array.shape, array.dtype.name) for name, array in arrays.items()}
        self._bits = {name: flat_bits(array) for name, array in arrays.items()}

    def specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return self._specs

    def owned(self, name: str) -> None:
        return None

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        return self._bits[name].take(positions.view(np.int64))

    def apply(self, update: StagedUpdate) -> None:
        """Single elements first, keeping the displaced ones so that an error can be undone; whole runs last: those are plain copies
        between arrays of equal size, which do not fail, and keeping what they displace would double the memory."""
        writes = [(run, bits) for tensor, runs in update.by_tensor() for bits in self._storages(tensor) for run in runs]
        undo: list[tuple[StagedRun, np.ndarray, np.ndarray]] = []
        try:
            for run, bits in writes:
                if run.local is not None:
                    undo.append((run, bits, bits.take(run.positions().view(np.int64))))
                    self._write(run, bits, run.bits)
        except BaseException:
            for run, bits, displaced in reversed(undo):
                self._write(run, bits, displaced)
            raise
        for run, bits in writes:
            if run.local is None:
                scatter_run(run.tensor, run.run_idx, run.bits, bits)

    def _storages(self, tensor: TensorLayout) -> list[np.ndarray]:
        """The arrays that hold a tensor, each once: tied names may share one or have their own."""
        held = {name: self._bits[name] for name in (tensor.name, *tensor.tied) if name in self._bits}
        return list({bits.__array_interface__["data"][0]: bits for bits in held.values()}.values())

    @staticmethod
    def _write(run: StagedRun, bits: np.ndarray, values: np.ndarray) -> None:
        bits[run.positions().view(np.int64)] = values
