"""JetStream's `engine_api.Engine` (google-jetstream 0.2.2) for Qwen3, so that JetStream's own Driver can serve it too.

Works without google-jetstream: the class has the methods its Engine asks for, and results are made by `result_type`, which is
JetStream's own class where that is installed. It computes with the same functions as JetStreamEngine (compute.py), but a driver
owns the state: every slot has its pages for good, no request knows another. It refuses what that cannot do: priorities, prefix
reuse between requests, preemption; for those drive JetStreamEngine. head_engine_api.py has the newer signatures.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import Array, Float32, Int32

from common.types import Request, SamplingKey, SamplingParams
from rose_jax.jetstream.compute import Block, draw, row_block, shard_attention
from rose_jax.jetstream.step_inputs import DRAW, KEY, POSITION, ROW_PAGES, TOKEN, sampling_columns
from rose_jax.models.checkpoint_table import TENSOR_AXIS
from rose_jax.models.qwen3 import Qwen3, abstract_model
from rose_jax.models.qwen3_config import Qwen3Config

Params = tuple[Array, ...]
Sampler = Callable[[Float32[Array, "N V"]], Int32[Array, "N"]]
SMALLEST_PREFILL = 16
"""JetStream pads prompts to powers of two from here on."""


class Tokenizer(Protocol):
    """What JetStream asks of a tokenizer; `stop_tokens` ends a completion."""

    @property
    def stop_tokens(self) -> set[int]: ...


@struct.dataclass
class ResultTokens:
    """One array [slots, 3] of token, validity and tokens generated so far, as JetStream's class of this name."""

    data: Array | np.ndarray
    tokens_idx: tuple[int, int] = struct.field(pytree_node=False)
    valid_idx: tuple[int, int] = struct.field(pytree_node=False)
    length_idx: tuple[int, int] = struct.field(pytree_node=False)
    samples_per_slot: int = struct.field(pytree_node=False)

    def convert_to_numpy(self) -> ResultTokens:
        return self.replace(data=np.asarray(self.data))  # type: ignore[attr-defined]


@struct.dataclass
class Prefix:
    """A prompt's keys and values, its newest token not included: `row` says where that one goes. One page array per layer."""

    layers: list[Array]
    row: Int32[Array, "W"]


@struct.dataclass
class DecodeState:
    """Cache of all slots, one array [slots * pages, ...] per layer, and the row each slot computes next."""

    layers: list[Array]
    rows: Int32[Array, "S W"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DriverConfig:
    """What a driver cannot say per request. `max_context_tokens` and `page_tokens` are powers of two."""

    max_slots: int
    max_context_tokens: int
    page_tokens: int = 16
    temperature: float = 1.0
    run_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "page_tokens"):
            size = getattr(self, name)
            if size < SMALLEST_PREFILL or size & (size - 1):
                raise ValueError(f"{name}={size} must be a power of two of at least {SMALLEST_PREFILL}: JetStream pads to those")

    @property
    def pages_per_slot(self) -> int:
        return self.max_context_tokens // self.page_tokens


class Qwen3Engine:
    """See the module. `decode_state` arguments are donated: use what is returned."""

    def __init__(
        self,
        config: DriverConfig,
        model_config: Qwen3Config,
        *,
        mesh: Mesh | None = None,
        tokenizer: Tokenizer | None = None,
        tokenizer_parameters: object = None,
        result_type: type = ResultTokens,
        param_dtype: jnp.dtype = jnp.float32,
    ) -> None:
        self._config, self._model_config, self._mesh = config, model_config, mesh
        self._tokenizer, self._tokenizer_parameters, self._result_type = tokenizer, tokenizer_parameters, result_type
        self._graph, shapes = nnx.split(abstract_model(model_config, param_dtype))
        treedef = jax.tree.structure(shapes)
        self._treedef: jax.tree_util.PyTreeDef = treedef
        self._dtype = param_dtype
        self._attention = shard_attention(mesh)
        self._num_prefilled = itertools.count()
        self._prefill = jax.jit(self._prefill_step)
        self._insert = jax.jit(self._insert_step, donate_argnums=1)
        self._generate = jax.jit(self._generate_step, donate_argnums=1, static_argnames="sampler")

    def load_params(self, params: nnx.State) -> Params:
        """The parameters as `prefill` and `generate` take them."""
        assert jax.tree.structure(params) == self._treedef, "the parameters are of another model"
        return tuple(jax.tree.leaves(params))

    def prefill(
        self, *, params: Params, existing_prefix: Prefix | None = None, padded_tokens: Int32[Array, "L"], true_length: int
    ) -> Prefix:
        """Compute the keys and values of a prompt, or of what follows `existing_prefix`, but for the last token."""
        if existing_prefix is None:
            row = np.zeros(ROW_PAGES + self._config.pages_per_slot, np.int32)
            row[KEY:ROW_PAGES] = self._sampling_columns(next(self._num_prefilled))
            num_pages = -(-padded_tokens.shape[0] // self._config.page_tokens)
            layers = [self._new_pages(num_pages) for _ in range(self._model_config.num_layers)]
        else:
            row = np.asarray(existing_prefix.row)
            missing = self._config.pages_per_slot - existing_prefix.layers[0].shape[0]
            layers = [jnp.pad(layer, [(0, missing)] + [(0, 0)] * 4) for layer in existing_prefix.layers]
        return self._prefill(params, layers, row, jnp.asarray(padded_tokens), true_length, existing_prefix is not None)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Put a prompt into a slot, whatever was there before."""
        return self._insert(prefix, decode_state, slot)

    def extract(self, decode_state: DecodeState, slot: int) -> Prefix:
        """The inverse of `insert`: a slot's state, to go on from later."""
        first, count = slot * self._config.pages_per_slot, self._config.pages_per_slot
        return Prefix(layers=[layer[first : first + count] for layer in decode_state.layers], row=decode_state.rows[slot])

    def generate(
        self, params: Params, decode_state: DecodeState, sampler: Sampler | None = None
    ) -> tuple[DecodeState, ResultTokens]:
        """One token for every slot. A slot is valid while it holds a prompt and has room."""
        decode_state, data = self._generate(params, decode_state, sampler=sampler)
        return decode_state, self._result_type(data, (0, 1), (1, 2), (2, 3), 1)

    def init_decode_state(self) -> DecodeState:
        config = self._config
        rows = np.zeros((config.max_slots, ROW_PAGES + config.pages_per_slot), np.int32)
        rows[:, POSITION] = -1
        rows[:, ROW_PAGES:] = np.arange(config.max_slots * config.pages_per_slot).reshape(config.max_slots, -1)
        layers = [self._new_pages(config.max_slots * config.pages_per_slot) for _ in range(self._model_config.num_layers)]
        return DecodeState(layers=layers, rows=jnp.asarray(rows))

    def get_prefix_destination_sharding(self) -> Sharding:
        if self._mesh is None:
            return SingleDeviceSharding(jax.devices()[0])
        return NamedSharding(self._mesh, PartitionSpec())

    def get_tokenizer(self) -> object:
        """The `tokenizer_parameters` it was built with."""
        return self._tokenizer_parameters

    def build_tokenizer(self, metadata: object) -> Tokenizer:
        del metadata
        if self._tokenizer is None:
            raise ValueError("this engine was built without a tokenizer; pass tokenizer=")
        return self._tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        return self._config.max_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._config.max_context_tokens

    @property
    def mesh(self) -> Mesh:
        if self._mesh is not None:
            return self._mesh
        return jax.make_mesh((1,), (TENSOR_AXIS,), devices=jax.devices()[:1])

    @property
    def colocated_cpus(self) -> None:
        return None

    def _sampling_columns(self, trajectory_id: int) -> Int32[np.ndarray, "columns"]:
        request = Request(
            request_id="",
            prompt_token_ids=(),
            sampling=SamplingParams(max_tokens=1, temperature=self._config.temperature),
            key=SamplingKey(run_seed=self._config.run_seed, trajectory_id=trajectory_id, turn_idx=0),
        )
        return sampling_columns(request, self._model_config.vocab_size)

    def _new_pages(self, num_pages: int) -> Array:
        model = self._model_config
        sharding = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec(None, None, TENSOR_AXIS))
        shape = (num_pages, 2, model.num_kv_heads, self._config.page_tokens, model.head_dim)
        return jnp.zeros(shape, self._dtype, device=sharding)

    def _forward(self, params: Params, layers: list[Array], block: Block, token_ids: Array) -> tuple[list[Array], Qwen3, Array]:
        model: Qwen3 = nnx.merge(self._graph, jax.tree.unflatten(self._treedef, params))
        layers = list(layers)

        def attend(layer_idx: int, q: Array, k: Array, v: Array) -> Array:
            (layers[layer_idx],), out = self._attention([layers[layer_idx]], [[block]], q[0], k[0], v[0])
            return out[None]

        hidden = model(token_ids.reshape(1, -1), block.positions.reshape(1, -1), attend)[0]
        return layers, model, hidden

    def _prefill_step(
        self,
        params: Params,
        layers: list[Array],
        row: Int32[Array, "W"],
        padded_tokens: Int32[Array, "L"],
        true_length: Array,
        continues: Array,
    ) -> Prefix:
        """After an existing prefix its newest token comes first: that one is not computed yet."""
        length = padded_tokens.shape[0]
        shifted = jnp.roll(padded_tokens, 1).at[0].set(row[TOKEN])
        token_ids = jnp.where(continues, shifted, padded_tokens).astype(jnp.int32)
        start = jnp.where(continues, row[POSITION], 0)
        num_computed = true_length - jnp.where(continues, 0, 1)
        offsets = jnp.arange(length)
        block = Block(
            positions=(start + offsets)[None],
            valid=(offsets < num_computed)[None],
            pages=jnp.arange(layers[0].shape[0])[None],
        )
        layers, _, _ = self._forward(params, layers, block, token_ids)
        newest = padded_tokens[true_length - 1].astype(jnp.int32)
        return Prefix(layers=layers, row=row.at[TOKEN].set(newest).at[POSITION].set(start + num_computed))

    def _insert_step(self, prefix: Prefix, state: DecodeState, slot: Array) -> DecodeState:
        first_page = slot * self._config.pages_per_slot
        layers = [
            jax.lax.dynamic_update_slice_in_dim(layer, pages, first_page, axis=0)
            for layer, pages in zip(state.layers, prefix.layers, strict=True)
        ]
        return DecodeState(layers=layers, rows=state.rows.at[slot, :ROW_PAGES].set(prefix.row[:ROW_PAGES]))

    def _generate_step(
        self, params: Params, state: DecodeState, *, sampler: Sampler | None
    ) -> tuple[DecodeState, Int32[Array, "S 3"]]:
        rows = state.rows
        layers, model, hidden = self._forward(params, state.layers, row_block(rows), rows[:, TOKEN])
        logits = model.logits(hidden)
        token_ids = draw(logits, rows, max_top=0, with_options=False).token_ids[:, 0] if sampler is None else sampler(logits)
        valid = rows[:, POSITION] >= 0
        position = jnp.where(valid & (rows[:, POSITION] + 1 < self._config.max_context_tokens), rows[:, POSITION] + 1, -1)
        num_drawn = rows[:, DRAW] + 1
        rows = rows.at[:, TOKEN].set(token_ids).at[:, POSITION].set(position).at[:, DRAW].set(num_drawn)
        return DecodeState(layers=layers, rows=rows), jnp.stack([token_ids, valid.astype(jnp.int32), num_drawn], axis=1)
