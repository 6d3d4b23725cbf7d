"""StepRunner: weights, cache and compiled programs of one process. It runs StepInputs and decides nothing.

In a multi-process engine every process has one and runs the same inputs; only rank 0 has a scheduler. The cache is donated to each
step, so an array of it read elsewhere is gone after the next step. Weights are an argument of the programs: a new version never
compiles anything. Invariant: every program a step can need was compiled by `warm_up`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common.serving import parking
from rose_jax.jetstream.compute import Caches, Drawn, make_draw, make_step
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.invariant import make_invariant_step
from rose_jax.jetstream.step_inputs import POSITION, ROW_PAGES, TILE_TOKENS, StepInputs
from rose_jax.mesh import param_shardings
from rose_jax.models.checkpoint_table import TENSOR_AXIS
from rose_jax.models.qwen3 import abstract_model
from rose_jax.models.qwen3_config import Qwen3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What `warm_up` did."""

    num_programs: int
    duration_s: float


class StepRunner:
    """See the module. `params` are the engine's from then on: nobody may donate them.

    Args:
        mesh: with an axis "tensor", over which parameters and heads are cut; None: one device, where `params` are.
    """

    def __init__(self, config: JetStreamConfig, model_config: Qwen3Config, params: nnx.State, *, mesh: Mesh | None = None) -> None:
        self.config = config
        self.model_config = model_config
        self._mesh = mesh
        self._dtype = jax.tree.leaves(params)[0].dtype
        if mesh is not None and model_config.num_kv_heads % mesh.shape[TENSOR_AXIS]:
            raise ValueError(
                f"num_kv_heads={model_config.num_kv_heads} is not divisible by the mesh's {TENSOR_AXIS}={mesh.shape[TENSOR_AXIS]}: "
                "the cache is cut by heads; use a divisor"
            )
        graph, shapes = nnx.split(abstract_model(model_config, self._dtype))
        leaves, treedef = jax.tree.flatten(shapes)
        self._treedef: jax.tree_util.PyTreeDef = treedef
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        device = next(iter(jax.tree.leaves(params)[0].devices())) if isinstance(jax.tree.leaves(params)[0], jax.Array) else None
        self._param_shardings = (
            [jax.sharding.SingleDeviceSharding(device or jax.devices()[0])] * len(leaves)
            if mesh is None
            else jax.tree.leaves(param_shardings(model_config, shapes, mesh))
        )
        self._cache_sharding = (
            self._param_shardings[0] if mesh is None else NamedSharding(mesh, PartitionSpec(None, None, TENSOR_AXIS))
        )
        max_top = min(config.max_top_logprobs, model_config.vocab_size)
        if config.invariant:
            self._step = make_invariant_step(graph, self._treedef, tile_tokens=config.tile_tokens, max_top=max_top, mesh=mesh)
        else:
            self._step = make_step(
                graph,
                self._treedef,
                tile_tokens=config.tile_tokens,
                max_draws=config.max_step_draws,
                vocab_size=model_config.vocab_size,
                mesh=mesh,
            )
            self._draw = make_draw(max_top=max_top)
        self._params = self._place(params)
        self._caches: Caches = []
        self.reset_caches(config.num_chunks)

    @property
    def num_chunks(self) -> int:
        return len(self._caches[0])

    @property
    def cache_bytes(self) -> int:
        """Bytes of all live chunks, over all devices."""
        return sum(chunk.nbytes for chunks in self._caches for chunk in chunks)

    def run(self, inputs: StepInputs) -> Drawn:
        """Start a step; returns at once, its arrays are ready when the device is done."""
        return self._call(self._caches, inputs)

    def load(self, params: nnx.State) -> None:
        """Use these weights from the next step on.

        Raises:
            ValueError: a tensor is missing or has another shape or dtype; the old weights stay.
        """
        self._params = self._place(params)

    def reset_caches(self, num_chunks: int) -> None:
        """Zeroed caches in place of whatever is there."""
        self._caches = []
        self._caches = [[self._new_chunk() for _ in range(num_chunks)] for _ in range(self.model_config.num_layers)]

    def remove_chunk(self) -> None:
        """Free the last chunk of every layer on the device at once."""
        for chunks in self._caches:
            chunks.pop().delete()

    def add_chunk(self) -> None:
        for chunks in self._caches:
            chunks.append(self._new_chunk())

    def park(self) -> Iterator[None]:
        """Move weights to a file and give back the caches' memory, whose contents are then zero; both on CPU only."""
        caches = [chunk for chunks in self._caches for chunk in chunks]
        for _ in itertools.chain(parking.park(_ranges(self._params)), parking.discard(_ranges(caches))):
            yield

    def activate(self) -> Iterator[None]:
        for _ in parking.activate(_ranges(self._params)):
            yield

    def close(self) -> None:
        for chunks in self._caches:
            for chunk in chunks:
                chunk.delete()
        self._caches, self._params = [], ()

    def warm_up(self) -> WarmUp:
        """Compile every program, by running empty steps; the cache keeps what it holds."""
        started_s = time.perf_counter()
        num_programs = 0
        for num_chunks in range(self.config.fewest_chunks, self.num_chunks + 1):
            for inputs in self._empty_steps(num_chunks):
                caches = [chunks[:num_chunks] for chunks in self._caches]
                jax.block_until_ready(self._call(caches, inputs))
                for chunks, written in zip(self._caches, caches, strict=True):
                    chunks[:num_chunks] = written
                num_programs += 1
        return WarmUp(num_programs=num_programs, duration_s=time.perf_counter() - started_s)

    def _empty_steps(self, num_chunks: int) -> Iterator[StepInputs]:
        config = self.config
        if config.invariant:
            width = TILE_TOKENS + config.tile_tokens + config.pages_per_context
            yield StepInputs(
                rows=np.zeros((num_chunks, config.max_units, ROW_PAGES), np.int32),
                tiles=np.zeros((num_chunks, config.max_units, width), np.int32),
                with_options=True,
                num_units=np.zeros(num_chunks, np.int32),
            )
            return
        shapes = itertools.product(config.rows, (0, *config.tiles), config.contexts, (False, True))
        for num_rows, num_tiles, context_tokens, with_options in shapes:
            if with_options and num_tiles:
                continue  # that program sees rows only
            num_pages = context_tokens // config.page_tokens
            rows = np.zeros((num_chunks, num_rows, ROW_PAGES + num_pages), np.int32)
            rows[:, :, POSITION] = -1
            tiles = np.zeros((num_chunks, num_tiles, TILE_TOKENS + config.tile_tokens + num_pages), np.int32)
            yield StepInputs(rows=rows, tiles=tiles, with_options=with_options)

    def _call(self, caches: Caches, inputs: StepInputs) -> Drawn:
        """Run a step on `caches`, whose arrays are donated; the lists then hold the new ones."""
        num_units = () if inputs.num_units is None else (inputs.num_units,)
        with contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh):
            written, drawn, *logits = self._step(self._params, caches, inputs.rows, inputs.tiles, *num_units)
            caches[:] = written
            if logits and inputs.with_options:
                drawn = self._draw(*logits, inputs.rows)
        return drawn

    def _place(self, params: nnx.State) -> tuple[jax.Array, ...]:
        leaves, treedef = jax.tree.flatten(params)
        if treedef != self._treedef:
            raise ValueError(f"the weights' tree is {treedef}, the model's is {self._treedef}")
        for (path, leaf), (shape, dtype) in zip(jax.tree.leaves_with_path(params), self._shapes, strict=True):
            if leaf.shape != shape or leaf.dtype != dtype:
                raise ValueError(
                    f"weight {jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, the engine was built with "
                    f"{np.dtype(dtype)}{list(shape)}"
                )
        return tuple(jax.device_put(leaves, self._param_shardings))

    def _new_chunk(self) -> jax.Array:
        config, model = self.config, self.model_config
        shape = (config.chunk_pages, 2, model.num_kv_heads, config.page_tokens, model.head_dim)
        return jnp.zeros(shape, self._dtype, device=self._cache_sharding)


def _ranges(arrays: Iterable[jax.Array]) -> list[parking.Range]:
    """Of what lies in memory of this process."""
    shards = [shard.data for array in arrays for shard in array.addressable_shards]
    return [(shard.unsafe_buffer_pointer(), shard.nbytes) for shard in shards if shard.device.platform == "cpu"]
