"""JaxWeightTarget: the live weights of a JAX engine as the transfer layer sees them, by checkpoint name.

JAX arrays are never written in place: an update makes new arrays beside the old ones and hands the whole tree to the engine's
`commit`, so a failure at any point leaves the engine with the old version, whole. A sharded tensor is read and made anew device by
device: nothing is gathered, and of an engine over several processes each fetches what its own devices hold. The engine may compute
in a wider dtype than is published; widening is exact, and so is the way back. It knows one checkpoint layout, the model's own;
stacked or fused parameters would be mapped here.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx
from jaxtyping import Shaped, UInt64

from common.serving.engine import StepEngine
from common.transfer.bits import BITS_DTYPES, DTYPES, flat_bits, from_bits
from common.transfer.boxes import Box, box_of_slices, strided
from common.transfer.rank_target import elements_inside, write_blocks
from common.transfer.staging import StagedRun, StagedUpdate
from rose_jax.export import named_tensors, params_from_named
from rose_jax.kernels.sparse import read_elements, write_elements
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.shards import local_parts


class JaxWeightTarget:
    """See the module and common.transfer.target.WeightTarget.

    Args:
        params: what the engine was built with, on the devices where the engine has them.
        weights_dtype: the dtype that is published; `params` may have a wider one.
    """

    def __init__(self, engine: StepEngine[nnx.State], model_config: Qwen3Config, params: nnx.State, *, weights_dtype: str) -> None:
        self._engine, self._model_config, self._dtype = engine, model_config, weights_dtype
        self._live: dict[str, jax.Array] = dict(named_tensors(params))

    def specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return {name: (tuple(tensor.shape), self._dtype) for name, tensor in self._live.items()}

    def owned(self, name: str) -> tuple[Box, ...] | None:
        tensor = self._live[name]
        return None if tensor.is_fully_addressable else tuple(box for box, _ in local_parts(tensor))

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        tensor = self._live[name]
        bits = np.empty(len(positions), BITS_DTYPES[self._dtype])
        for box, data in local_parts(tensor):
            here, local = strided(tensor.shape, box).to_local(positions)
            if len(here):
                bits[here] = read_elements(data, local.view(np.uint64), self._dtype).view(bits.dtype)
        return bits

    def published(self, name: str) -> np.ndarray:
        """A live tensor in the dtype that is published, on the host."""
        return np.asarray(self._live[name].astype(self._dtype))

    def apply(self, update: StagedUpdate) -> None:
        new = dict(self._live)
        for tensor, runs in update.by_tensor():
            for name in (tensor.name, *tensor.tied):
                if name in new:
                    new[name] = self._written(new[name], runs)
        self._engine.commit(params_from_named(self._model_config, new), version=update.version)
        self._live = new

    def _written(self, old: jax.Array, runs: list[StagedRun]) -> jax.Array:
        """A tensor with some runs written, made of new shards where the old ones lie."""
        on_host: dict[Box, np.ndarray] = {}
        shards = []
        for shard in old.addressable_shards:
            box = box_of_slices(old.shape, shard.index)
            if all(run.local is not None for run in runs):
                shards.append(self._with_elements(shard.data, box, runs))
                continue
            if box not in on_host:
                on_host[box] = self._on_host(shard.data, box, runs)
            shards.append(jax.device_put(on_host[box].astype(old.dtype), shard.device))
        return jax.make_array_from_single_device_arrays(old.shape, old.sharding, shards)

    def _with_elements(self, old: jax.Array, box: Box, runs: list[StagedRun]) -> jax.Array:
        """A shard with single elements written, on its device."""
        found = [elements_inside(run, box) for run in runs]
        positions = np.concatenate([local for local, _ in found]).view(np.uint64)
        if not len(positions):
            return old
        return write_elements(old, positions, np.concatenate([bits for _, bits in found]).view(DTYPES[self._dtype]))

    def _on_host(self, old: jax.Array, box: Box, runs: list[StagedRun]) -> np.ndarray:
        """A shard with runs written of which some are whole: it goes over the host."""
        bits = flat_bits(np.array(old.astype(self._dtype)))
        for run in runs:
            if run.local is None:
                write_blocks(run, box, bits)
            else:
                local, values = elements_inside(run, box)
                bits[local] = values
        return from_bits(bits, self._dtype, box.extent)
