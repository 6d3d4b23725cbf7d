"""The one table of a Qwen3 model's weights: Hugging Face name, parameter path, shape and partition.

Loading, saving, sharding and the transfer of weights all read it, so that a tensor's name or layout is written down once.
Parameters are kept in checkpoint orientation ([out, in], the shapes of the file): nothing is ever transposed on the way in or out.

A dimension is cut only between whole units (a key-value head is never split). Where an axis of the mesh does not divide the number
of units, that tensor is replicated along the axis: four key-value heads on tensor=8 cost memory, not correctness.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from rose_jax.models.qwen3_config import Qwen3Config

FSDP_AXIS = "fsdp"
TENSOR_AXIS = "tensor"

Path = tuple[str | int, ...]

EMBEDDING_NAME = "model.embed_tokens.weight"
HEAD_NAME = "lm_head.weight"
HEAD_PATH = ("lm_head",)
"""A tied model has no such parameter: its head is the embedding."""


class Dim(enum.Enum):
    """A named dimension of a weight."""

    VOCAB = "vocabulary"
    HIDDEN = "hidden"
    QUERY = "query heads x head_dim"
    KEY_VALUE = "key-value heads x head_dim"
    HEAD = "head_dim"
    FEED_FORWARD = "intermediate"


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """One row: `{layer}` in the name and in the path stands for the layer's index."""

    hf_name: str
    path: tuple[str, ...]
    dims: tuple[Dim, ...]
    axes: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One weight of a given model. `units[i]` is what dimension i may be divided into."""

    hf_name: str
    path: Path
    shape: tuple[int, ...]
    units: tuple[int, ...]
    axes: tuple[str | None, ...]

    def partition(self, axis_sizes: Mapping[str, int]) -> PartitionSpec:
        """How the tensor lies on a mesh with these axes (replicated along those that do not divide it)."""
        fitting = (
            axis if axis is not None and axis in axis_sizes and units % axis_sizes[axis] == 0 else None
            for axis, units in zip(self.axes, self.units, strict=True)
        )
        return PartitionSpec(*fitting)


_IN = (TENSOR_AXIS, FSDP_AXIS)  # column parallel: each tensor rank makes its own outputs
_OUT = (FSDP_AXIS, TENSOR_AXIS)  # row parallel: each tensor rank consumes its own inputs, then outputs are summed
_LAYER = "model.layers.{layer}"

TABLE: tuple[TensorRule, ...] = (
    TensorRule(EMBEDDING_NAME, ("embed_tokens",), (Dim.VOCAB, Dim.HIDDEN), _IN),
    TensorRule(f"{_LAYER}.input_layernorm.weight", ("layers", "{layer}", "input_norm"), (Dim.HIDDEN,), (None,)),
    TensorRule(f"{_LAYER}.self_attn.q_proj.weight", ("layers", "{layer}", "attention", "q_proj"), (Dim.QUERY, Dim.HIDDEN), _IN),
    TensorRule(f"{_LAYER}.self_attn.k_proj.weight", ("layers", "{layer}", "attention", "k_proj"), (Dim.KEY_VALUE, Dim.HIDDEN), _IN),
    TensorRule(f"{_LAYER}.self_attn.v_proj.weight", ("layers", "{layer}", "attention", "v_proj"), (Dim.KEY_VALUE, Dim.HIDDEN), _IN),
    TensorRule(f"{_LAYER}.self_attn.o_proj.weight", ("layers", "{layer}", "attention", "o_proj"), (Dim.HIDDEN, Dim.QUERY), _OUT),
    TensorRule(f"{_LAYER}.self_attn.q_norm.weight", ("layers", "{layer}", "attention", "q_norm"), (Dim.HEAD,), (None,)),
    TensorRule(f"{_LAYER}.self_attn.k_norm.weight", ("layers", "{layer}", "attention", "k_norm"), (Dim.HEAD,), (None,)),
    TensorRule(f"{_LAYER}.post_attention_layernorm.weight", ("layers", "{layer}", "mlp_norm"), (Dim.HIDDEN,), (None,)),
    TensorRule(f"{_LAYER}.mlp.gate_proj.weight", ("layers", "{layer}", "mlp", "gate_proj"), (Dim.FEED_FORWARD, Dim.HIDDEN), _IN),
    TensorRule(f"{_LAYER}.mlp.up_proj.weight", ("layers", "{layer}", "mlp", "up_proj"), (Dim.FEED_FORWARD, Dim.HIDDEN), _IN),
    TensorRule(f"{_LAYER}.mlp.down_proj.weight", ("layers", "{layer}", "mlp", "down_proj"), (Dim.HIDDEN, Dim.FEED_FORWARD), _OUT),
    TensorRule("model.norm.weight", ("final_norm",), (Dim.HIDDEN,), (None,)),
    TensorRule(HEAD_NAME, HEAD_PATH, (Dim.VOCAB, Dim.HIDDEN), _IN),
)

_NAME_OF_PATH = {rule.path: rule.hf_name for rule in TABLE}


def _size_and_units(dim: Dim, config: Qwen3Config) -> tuple[int, int]:
    heads = {Dim.QUERY: config.num_heads, Dim.KEY_VALUE: config.num_kv_heads}
    if dim in heads:
        return heads[dim] * config.head_dim, heads[dim]
    size = {
        Dim.VOCAB: config.vocab_size,
        Dim.HIDDEN: config.hidden_size,
        Dim.HEAD: config.head_dim,
        Dim.FEED_FORWARD: config.intermediate_size,
    }[dim]
    return size, size


def _entry(rule: TensorRule, config: Qwen3Config, layer_idx: int | None) -> TensorEntry:
    sizes = [_size_and_units(dim, config) for dim in rule.dims]
    return TensorEntry(
        hf_name=rule.hf_name.format(layer=layer_idx),
        path=tuple(layer_idx if part == "{layer}" and layer_idx is not None else part for part in rule.path),
        shape=tuple(size for size, _ in sizes),
        units=tuple(units for _, units in sizes),
        axes=rule.axes,
    )


def tensor_entries(config: Qwen3Config) -> tuple[TensorEntry, ...]:
    """All weights of a model in the order of its layers; a tied model has no lm_head.weight."""
    per_layer = [rule for rule in TABLE if "{layer}" in rule.path]
    first = TABLE.index(per_layer[0])
    last = TABLE.index(per_layer[-1])
    layers = [_entry(rule, config, layer_idx) for layer_idx in range(config.num_layers) for rule in per_layer]
    before = [_entry(rule, config, None) for rule in TABLE[:first]]
    after = [_entry(rule, config, None) for rule in TABLE[last + 1 :]]
    return tuple(entry for entry in (*before, *layers, *after) if entry.path != HEAD_PATH or not config.tie_word_embeddings)


def hf_name(path: Sequence[object]) -> str:
    """The Hugging Face name of a parameter.

    Raises:
        KeyError: the path is not in the table.
    """
    layer_idx = next((part for part in path if isinstance(part, int)), None)
    pattern = tuple("{layer}" if isinstance(part, int) else str(part) for part in path)
    return _NAME_OF_PATH[pattern].format(layer=layer_idx)
