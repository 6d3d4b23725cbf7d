"""Simulated ranks of a serving replica: which boxes each of TP x PP ranks holds of a model of Qwen3's shape, and their arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from common.transfer.bits import DTYPES
from common.transfer.boxes import Box, whole_box
from common.transfer.rank_target import RankTarget
from tests.common.transfer.models import Weights

Specs = dict[str, tuple[tuple[int, ...], str]]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
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
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab, self.hidden)}
        for layer in range(self.num_layers):
            name = f"model.layers.{layer}."
            shapes[name + "input_layernorm.weight"] = (self.hidden,)
            shapes[name + "self_attn.q_proj.weight"] = (self.heads * self.head_dim, self.hidden)
            shapes[name + "self_attn.k_proj.weight"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[name + "self_attn.v_proj.weight"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[name + "self_attn.o_proj.weight"] = (self.hidden, self.heads * self.head_dim)
            shapes[name + "mlp.up_proj.weight"] = (self.feed_forward, self.hidden)
            shapes[name + "mlp.down_proj.weight"] = (self.hidden, self.feed_forward)
        shapes[NORM] = (self.hidden,)
        if not self.tied:
            shapes[HEAD] = (self.vocab, self.hidden)
        return {name: (shape, dtype) for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One of tensor x pipeline ranks, as vLLM cuts a model: key-value heads are held by several ranks where there are fewer."""

    shape: Shape
    tensor: int
    pipeline: int
    tensor_rank: int
    pipeline_rank: int

    def names(self, specs: Specs) -> list[str]:
        """The tensors of this pipeline stage, a tied head under its own name on the last one."""
        per_stage = -(-self.shape.num_layers // self.pipeline)
        layers = range(self.pipeline_rank * per_stage, min((self.pipeline_rank + 1) * per_stage, self.shape.num_layers))
        names = [name for name in specs if any(name.startswith(f"model.layers.{layer}.") for layer in layers)]
        if self.pipeline_rank == 0:
            names.append(EMBEDDING)
        if self.pipeline_rank == self.pipeline - 1:
            names += [NORM, HEAD]
        return names

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        if len(shape) == 1:
            return whole_box(shape)
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        place, places = self.tensor_rank, self.tensor
        if name.endswith(("k_proj.weight", "v_proj.weight")) and self.tensor > self.shape.kv_heads:
            place, places = place * self.shape.kv_heads // self.tensor, self.shape.kv_heads
        start, extent = [0, 0], list(shape)
        start[axis], extent[axis] = place * shape[axis] // places, shape[axis] // places
        return Box(tuple(start), tuple(extent))

    def boxes(self, specs: Specs) -> dict[str, tuple[tuple[int, ...], Box]]:
        """(shape of the whole tensor, box held) by the name it is held under."""
        held = {}
        for name in self.names(specs):
            shape, _ = specs[EMBEDDING if name == HEAD and self.shape.tied else name]
            held[name] = (shape, self.box(name, shape))
        return held

    def target(self, specs: Specs) -> tuple[RankTarget, dict[str, tuple[Box, np.ndarray]]]:
        """A target full of zeros, and its arrays."""
        dtype = next(iter(specs.values()))[1]
        arrays = {name: (box, np.zeros(box.extent, DTYPES[dtype])) for name, (_, box) in self.boxes(specs).items()}
        whole = {name: (shape, dtype) for name, (shape, _) in self.boxes(specs).items()}
        return RankTarget(whole, {name: [part] for name, part in arrays.items()}), arrays


def ranks(shape: Shape, tensor: int, pipeline: int) -> list[Rank]:
    places = ((stage, rank) for stage in range(pipeline) for rank in range(tensor))
    return [Rank(shape=shape, tensor=tensor, pipeline=pipeline, tensor_rank=t, pipeline_rank=p) for p, t in places]


def assert_holds_its_slices(arrays: Mapping[str, tuple[Box, np.ndarray]], model: Weights) -> None:
    for name, (box, array) in arrays.items():
        whole = model[name] if name in model else model[EMBEDDING]
        assert array.tobytes() == whole[box.slices].tobytes(), name
