"""Which boxes each rank of a serving replica holds, for models of Qwen3's shape cut as serving engines cut them. Arithmetic alone.

For predictions, benchmarks and tests: a running engine says itself what it holds. Tensor parallelism cuts the outputs of
column-parallel projections and the vocabulary along rows, the inputs of row-parallel ones along columns, and replicates vectors;
key-value heads are held by several ranks where there are fewer heads than ranks. Pipeline stages take layers in order, the first
one the embedding, the last one the final norm and the head, which a tied model holds a second time there.
"""

from __future__ import annotations

import dataclasses

from common.transfer.boxes import Box, whole_box
from common.transfer.shards import ROW_PARALLEL_SUFFIXES

Specs = dict[str, tuple[tuple[int, ...], str]]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model. A tied head has no tensor of its own."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    tied: bool

    def specs(self, dtype: str = "bfloat16") -> Specs:
        """Shape and dtype name of every tensor, by checkpoint name."""
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            shapes[name + "input_layernorm.weight"] = (self.hidden,)
            shapes[name + "self_attn.q_proj.weight"] = (self.heads * self.head_dim, self.hidden)
            shapes[name + "self_attn.k_proj.weight"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[name + "self_attn.v_proj.weight"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[name + "self_attn.o_proj.weight"] = (self.hidden, self.heads * self.head_dim)
            shapes[name + "self_attn.q_norm.weight"] = (self.head_dim,)
            shapes[name + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[name + "post_attention_layernorm.weight"] = (self.hidden,)
            shapes[name + "mlp.gate_proj.weight"] = (self.feed_forward, self.hidden)
            shapes[name + "mlp.up_proj.weight"] = (self.feed_forward, self.hidden)
            shapes[name + "mlp.down_proj.weight"] = (self.hidden, self.feed_forward)
        shapes[NORM] = (self.hidden,)
        if not self.tied:
            shapes[HEAD] = (self.vocab, self.hidden)
        return {name: (shape, dtype) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One of `tensor` x `pipeline` ranks."""

    shape: ModelShape
    tensor: int
    pipeline: int
    tensor_rank: int
    pipeline_rank: int

    def names(self, specs: Specs) -> list[str]:
        """The tensors of this rank's stage."""
        per_stage = -(-self.shape.num_layers // self.pipeline)
        layers = range(self.pipeline_rank * per_stage, min((self.pipeline_rank + 1) * per_stage, self.shape.num_layers))
        prefixes = tuple(f"model.layers.{layer}." for layer in layers)
        names = [name for name in specs if name.startswith(prefixes)] if prefixes else []
        if self.pipeline_rank == 0:
            names.append(EMBEDDING)
        if self.pipeline_rank == self.pipeline - 1:
            names += [NORM, HEAD]
        return names

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        """What this rank holds of a tensor."""
        if len(shape) == 1:
            return whole_box(shape)
        axis = 1 if name.endswith(ROW_PARALLEL_SUFFIXES) else 0
        place, places = self.tensor_rank, self.tensor
        if name.endswith(("k_proj.weight", "v_proj.weight")) and self.tensor > self.shape.kv_heads:
            place, places = place * self.shape.kv_heads // self.tensor, self.shape.kv_heads
        start, extent = [0, 0], list(shape)
        start[axis], extent[axis] = place * shape[axis] // places, shape[axis] // places
        return Box(tuple(start), tuple(extent))

    def boxes(self, specs: Specs) -> dict[str, tuple[tuple[int, ...], Box]]:
        """(shape of the whole tensor, box held) by the name it is held under."""
        shapes = {name: specs[EMBEDDING if name == HEAD and self.shape.tied else name][0] for name in self.names(specs)}
        return {name: (shape, self.box(name, shape)) for name, shape in shapes.items()}


def ranks(shape: ModelShape, tensor: int, pipeline: int) -> list[Rank]:
    """All ranks of a replica, stage by stage."""
    places = ((stage, rank) for stage in range(pipeline) for rank in range(tensor))
    return [Rank(shape=shape, tensor=tensor, pipeline=pipeline, tensor_rank=t, pipeline_rank=p) for p, t in places]
