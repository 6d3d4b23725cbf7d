"""What a publisher reads: the new version's arrays, whole or in the parts that this process holds, as flat bits.

A part is a box of a tensor whose runs are encoded as if it were a tensor by itself; their addresses stay those of the whole tensor.
A tensor that one process publishes has one part, itself. Bits are made when first asked for and let go after the last run.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from common.transfer.bits import flat_bits
from common.transfer.boxes import Box, whole_box
from common.transfer.ownership import Owners
from common.transfer.shards import TensorLayout, WeightLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A tensor of which several processes each publish a part.

    `owners` are the same on every process. `read` gives the values of a box that is this process's own, as often as it is asked.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    owners: Owners
    read: Callable[[Box], np.ndarray]


Source = np.ndarray | ShardedTensor


@dataclasses.dataclass(frozen=True)
class Part:
    """A box that this process publishes. `local` addresses an array that holds the box alone."""

    tensor: TensorLayout
    box: Box
    local: TensorLayout

    def local_run(self, run_idx: int) -> int:
        """Number within `local` of a run of the whole tensor that lies in this box."""
        if self.local is self.tensor:
            return run_idx
        first = self.tensor.run(run_idx)[0].relative_to(self.box)
        cell = 0
        for axis in self.local.axis_order:
            cell = cell * self.local.grid[axis] + first.start[axis] // self.local.box_extent[axis]
        return cell // self.local.boxes_per_run


def parts_of(tensor: TensorLayout, owners: Owners, writer: int) -> tuple[Part, ...]:
    """The parts of a tensor that a process publishes."""
    if not owners:
        return (Part(tensor, whole_box(tensor.shape), tensor),)
    return tuple(
        Part(tensor, box, dataclasses.replace(tensor, shape=box.extent, tied=(), writers=())) for box, of in owners if of == writer
    )


class SourceBits:
    """The parts of every tensor of one version as flat bits, from any thread.

    Args:
        num_runs: how many runs of each tensor will be asked for.
    """

    def __init__(
        self, weights: Mapping[str, Source], layout: WeightLayout, parts: Sequence[Sequence[Part]], num_runs: Sequence[int]
    ) -> None:
        self._weights, self._tensors, self._parts = dict(weights), layout.tensors, parts
        self._runs_left = list(num_runs)
        self._bits: dict[int, list[np.ndarray]] = {}
        self._lock = threading.Lock()

    def bits(self, tensor_idx: int) -> list[Shaped[np.ndarray, "N"]]:
        """Of each part."""
        with self._lock:
            if tensor_idx not in self._bits:
                tensor, parts = self._tensors[tensor_idx], self._parts[tensor_idx]
                bits = _bits_of(self._weights[tensor.name], parts)
                for alias in tensor.tied:
                    other = self._weights.pop(alias, None)
                    if other is not None and not all(map(np.array_equal, _bits_of(other, parts), bits)):
                        raise ValueError(f"{alias} and {tensor.name} were tied and now differ; start a new publisher")
                self._bits[tensor_idx] = bits
            return self._bits[tensor_idx]

    def done(self, tensor_idx: int) -> None:
        """One run of a tensor was encoded."""
        with self._lock:
            self._runs_left[tensor_idx] -= 1
            if self._runs_left[tensor_idx] == 0:
                del self._bits[tensor_idx], self._weights[self._tensors[tensor_idx].name]


def _bits_of(source: Source, parts: Sequence[Part]) -> list[Shaped[np.ndarray, "N"]]:
    if not isinstance(source, ShardedTensor):
        return [flat_bits(np.ascontiguousarray(source))]
    arrays = [source.read(part.box) for part in parts]
    for part, array in zip(parts, arrays, strict=True):
        if array.shape != part.box.extent or array.dtype != source.dtype:
            raise ValueError(
                f"{part.tensor.name}: {array.dtype.name}{list(array.shape)} came for {part.box} of {source.dtype.name}"
                f"{list(source.shape)}"
            )
    return [flat_bits(np.ascontiguousarray(array)) for array in arrays]
