"""The live weights of one vLLM worker: read and written in place, at checkpoint coordinates.

An update is written run by run and what it displaces is kept on the host until `finish`, so that `rollback` restores every bit.
Parameters only: scratch tensors and buffers are never touched. Where weights arrive in a narrower dtype than parameters have, they
are widened, which is exact.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from jaxtyping import Int64, Shaped

from common.transfer.boxes import Box
from common.transfer.staging import StagedRun
from rose_gpu.vllm.weight_map import Part, find_parts

_INT_OF_BYTES = {2: torch.int16, 4: torch.int32}
_NUMPY_OF_BYTES = {2: np.int16, 4: np.int32}


@dataclasses.dataclass(frozen=True)
class _Displaced:
    """Values that were at `where` (flat indices, or a box of rows and columns) of a parameter."""

    param: torch.Tensor
    where: torch.Tensor | tuple[slice, ...]
    values: torch.Tensor


class RankWeights:
    """See the module.

    Args:
        arriving_dtype: name of the dtype in which weights are published.
    """

    def __init__(self, model: torch.nn.Module, arriving_dtype: str) -> None:
        self._model = model
        self._dtype: torch.dtype = getattr(torch, arriving_dtype)
        self._dtype_name = arriving_dtype
        self._parts: dict[str, list[Part]] = {}
        self._displaced: list[_Displaced] = []
        self.refresh()

    def refresh(self) -> None:
        """Look at the model again: a reload may have put its parameters elsewhere."""
        self._parts = {}
        for part in find_parts(self._model):
            self._parts.setdefault(part.tensor, []).append(part)

    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape of the whole tensor and published dtype, by checkpoint name."""
        return {name: (parts[0].shape, self._dtype_name) for name, parts in self._parts.items()}

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The boxes of a checkpoint tensor that this rank holds."""
        return tuple(Box(part.start, part.extent) for part in self._parts[name])

    def is_replicated(self, name: str) -> bool:
        return all(part.replicated for part in self._parts[name])

    @torch.inference_mode()
    def read(self, name: str, positions: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "m"], Shaped[np.ndarray, "m"]]:
        """Of the flat positions those that this rank holds (as indices into `positions`), and their published bits."""
        found, values = [], []
        for part in self._parts[name]:
            here, index = _local(part, positions)
            flat = part.param.view(-1)
            values.append(flat.index_select(0, torch.from_numpy(index).to(flat.device)).to(self._dtype))
            found.append(np.arange(len(positions)) if here is None else here)
        bits = torch.cat(values).view(_INT_OF_BYTES[self._dtype.itemsize]).cpu().numpy()
        return np.concatenate(found), bits

    @torch.inference_mode()
    def write(self, run: StagedRun) -> None:
        """Write what this rank holds of a run, under every name the tensor has here."""
        values = torch.from_numpy(run.bits.view(_NUMPY_OF_BYTES[self._dtype.itemsize])).view(self._dtype)
        for name in (run.tensor.name, *run.tensor.tied):
            for part in self._parts.get(name, ()):
                if run.local is None:
                    self._write_whole(part, run, values)
                else:
                    here, index = _local(part, run.positions().view(np.int64))
                    held = values if here is None else values.index_select(0, torch.from_numpy(here))
                    self._put_at(part.param.view(-1), torch.from_numpy(index), held)

    def finish(self) -> None:
        """Keep what was written."""
        self._displaced = []

    @torch.inference_mode()
    def rollback(self) -> None:
        """Restore what was there before the first write since the last `finish`."""
        for displaced in reversed(self._displaced):
            displaced.param[displaced.where] = displaced.values.to(displaced.param.device)
        self._displaced = []

    def _write_whole(self, part: Part, run: StagedRun, values: torch.Tensor) -> None:
        done = 0
        for box in run.tensor.run(run.run_idx):
            block = values[done : done + box.num_elements].reshape(box.extent)
            done += box.num_elements
            common = _intersection(box, part)
            if common is None:
                continue
            source = tuple(slice(a - s, b - s) for (a, b), s in zip(common, box.start, strict=True))
            target = [slice(a - s, b - s) for (a, b), s in zip(common, part.start, strict=True)]
            if target:
                target[0] = slice(target[0].start + part.param_row, target[0].stop + part.param_row)
            self._put(part.param, tuple(target), block[source])

    def _put(self, param: torch.Tensor, where: tuple[slice, ...], values: torch.Tensor) -> None:
        self._displaced.append(_Displaced(param, where, param[where].clone().cpu()))
        param[where] = values.to(param.device).to(param.dtype)

    def _put_at(self, flat: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        """index_select and index_copy_ take half the time of the same by brackets."""
        index = index.to(flat.device)
        self._displaced.append(_Displaced(flat, index, flat.index_select(0, index).cpu()))
        flat.index_copy_(0, index, values.to(flat.device).to(flat.dtype))


def _local(part: Part, positions: Int64[np.ndarray, "n"]) -> tuple[Int64[np.ndarray, "m"] | None, Int64[np.ndarray, "m"]]:
    """Which of the flat positions in the tensor a part holds (None: all), and where they are in its flat parameter."""
    row_elements = int(np.prod(part.shape[1:], dtype=np.int64))
    if part.extent == part.shape:
        offset = part.param_row * row_elements
        return None, positions + offset if offset else positions
    if len(part.shape) > 2:
        raise ValueError(f"{part.tensor}: only tensors of two axes are cut, this one has shape {part.shape}")
    width = part.extent[1] if len(part.extent) == 2 else 1
    first_column = part.start[1] if len(part.start) == 2 else 0
    row = positions // row_elements
    column = positions - row * row_elements - first_column
    row = row - part.start[0]
    here = np.flatnonzero((row >= 0) & (row < part.extent[0]) & (column >= 0) & (column < width))
    return here, (row[here] + part.param_row) * width + column[here]


def _intersection(box: Box, part: Part) -> list[tuple[int, int]] | None:
    """The common part of a box and a part, as (start, end) per axis of the tensor."""
    common = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(box.start, box.extent, part.start, part.extent, strict=True)]
    return common if all(start < end for start, end in common) else None
