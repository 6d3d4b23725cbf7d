"""JaxWeightTarget: the live weights of a JAX engine as the transfer layer sees them, by checkpoint name.

JAX arrays are never written in place: an update makes new arrays beside the old ones and hands the whole tree to the engine's
`commit`, so a failure at any point leaves the engine with the old version, whole. The engine may compute in a wider dtype than is
published; widening is exact, and so is the way back. It knows one checkpoint layout, the model's own; stacked or fused parameters
would be mapped here.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from jaxtyping import Shaped, UInt64

from common.serving.engine import StepEngine
from common.transfer.bits import BITS_DTYPES, DTYPES, flat_bits, from_bits
from common.transfer.changes import scatter_run
from common.transfer.shards import TensorLayout
from common.transfer.staging import StagedRun, StagedUpdate
from rose_jax.export import named_tensors, params_from_named
from rose_jax.kernels.sparse import read_elements, write_elements
from rose_jax.models.qwen3_config import Qwen3Config


class JaxWeightTarget:
    """See the module and common.transfer.target.WeightTarget.

    Args:
        params: what the engine was built with.
        weights_dtype: the dtype that is published; `params` may have a wider one.
    """

    def __init__(self, engine: StepEngine[nnx.State], model_config: Qwen3Config, params: nnx.State, *, weights_dtype: str) -> None:
        self._engine, self._model_config, self._dtype = engine, model_config, weights_dtype
        self._live: dict[str, jax.Array] = dict(named_tensors(params))

    def specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {name: (tuple(tensor.shape), self._dtype) for name, tensor in self._live.items()}

    def owned(self, name: str) -> None:
        return None

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        return read_elements(self._live[name], positions, self._dtype).view(BITS_DTYPES[self._dtype])

    def published(self, name: str) -> np.ndarray:
        """A live tensor in the dtype that is published, on the host."""
        return np.asarray(self._live[name].astype(self._dtype))

    def apply(self, update: StagedUpdate) -> None:
        new = dict(self._live)
        for tensor, runs in update.by_tensor():
            for name in (tensor.name, *tensor.tied):
                if name in new:
                    new[name] = self._written(new[name], tensor, runs)
        self._engine.commit(params_from_named(self._model_config, new), version=update.version)
        self._live = new

    def _written(self, old: jax.Array, tensor: TensorLayout, runs: list[StagedRun]) -> jax.Array:
        """A tensor with some runs written; where a run is whole the tensor goes over the host, else only what changes does."""
        if all(run.local is not None for run in runs):
            positions = np.concatenate([run.positions() for run in runs])
            values = np.concatenate([run.bits for run in runs]).view(DTYPES[tensor.dtype])
            return write_elements(old, positions, values)
        host = np.array(old.astype(self._dtype))
        bits = flat_bits(host)
        for run in runs:
            if run.local is None:
                scatter_run(run.tensor, run.run_idx, run.bits, bits)
            else:
                bits[run.positions().view(np.int64)] = run.bits
        return jax.device_put(from_bits(bits, self._dtype, old.shape).astype(old.dtype), old.sharding)
