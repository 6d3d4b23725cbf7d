"""VllmWeightTarget: the live weights of a vLLM engine as the transfer layer sees them, by checkpoint name.

Works on either form of the engine. Values are never kept here: what is read is what the workers compute with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np
from jaxtyping import Shaped, UInt64

from common.serving.engine import StepEngine
from common.transfer.bits import from_bits
from common.transfer.staging import StagedUpdate

MAX_READ_ELEMENTS = 1 << 22
"""Elements asked for at a time when a whole tensor is read: bounds the positions in flight to 32 MiB."""

Specs = Mapping[str, tuple[tuple[int, ...], str]]


class EngineWeights(Protocol):
    """What both forms of the engine offer for their weights."""

    def specs(self) -> Specs: ...

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]: ...


class UpdatableEngine(StepEngine[StagedUpdate], Protocol):
    """A StepEngine that takes staged updates and shows its weights."""

    @property
    def weights(self) -> EngineWeights: ...

    def commit_in_slices(self, weights: StagedUpdate, *, version: int) -> Iterator[None]: ...


class VllmWeightTarget:
    """See the module and common.transfer.target.WeightTarget."""

    def __init__(self, engine: UpdatableEngine) -> None:
        self._engine = engine

    def specs(self) -> Specs:
        return self._engine.weights.specs()

    def owned(self, name: str) -> None:
        return None

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        return self._engine.weights.read(name, positions)

    def apply(self, update: StagedUpdate) -> None:
        self._engine.commit(update, version=update.version)

    def apply_in_slices(self, update: StagedUpdate) -> Iterator[None]:
        """See common.transfer.target.SlicedTarget."""
        return self._engine.commit_in_slices(update, version=update.version)

    def published(self, name: str) -> np.ndarray:
        """A whole live tensor in the dtype that is published."""
        shape, dtype = self.specs()[name]
        num_elements = int(np.prod(shape, dtype=np.int64))
        starts = range(0, num_elements, MAX_READ_ELEMENTS)
        ends = [min(start + MAX_READ_ELEMENTS, num_elements) for start in starts]
        pieces = [self.read(name, np.arange(start, end, dtype=np.uint64)) for start, end in zip(starts, ends, strict=True)]
        return from_bits(np.concatenate(pieces), dtype, shape)
