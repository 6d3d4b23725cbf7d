"""One step on the device: write keys and values into pages, attend through page tables, sample. Pure functions.

The cache of a layer is a few equal chunks [pages, 2 (k, v), K, tokens of a page, d]. Heads stand before tokens so that a gather of
whole (page, head) rows lands in the order the batched products want. Every layer writes all of the step's keys before it reads.
Paged attention follows vLLM's (arXiv 2309.06180), the mixture of prefill chunks and decodes Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32

from rose_jax.jetstream.step_inputs import (
    BASE,
    DRAW,
    FIRST,
    KEY,
    LAST,
    MIN_P,
    NO_TOKEN,
    NUM_DRAWS,
    POSITION,
    ROW_PAGES,
    SAMPLE_AT,
    STOPS,
    TEMPERATURE,
    TILE_TOKENS,
    TOKEN,
    TOP_K,
    TOP_P,
)
from rose_jax.models.checkpoint_table import TENSOR_AXIS
from rose_jax.models.qwen3 import Qwen3
from rose_jax.sampling import Cuts, sample_tokens, top_logprobs

Chunk = Float[Array, "pages 2 K tokens d"]
Caches = list[list[Array]]
"""caches[layer_idx][chunk_idx] is a Chunk."""
MASKED_SCORE = -1e30
"""Finite, so that padding rows, which see nothing, stay finite too."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Up to D tokens for each of a step's N rows, NO_TOKEN after the last; the M most probable ones of the first, if asked for."""

    token_ids: Int32[Array, "N D"]
    logprobs: Float32[Array, "N D"]
    top_token_ids: Int32[Array, "N M"]
    top_logprobs: Float32[Array, "N M"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """Queries of one shape in one chunk: B sequences of Q positions each; `valid` says which exist."""

    positions: Int32[Array, "B Q"]
    valid: Bool[Array, "B Q"]
    pages: Int32[Array, "B P"]

    @property
    def num_queries(self) -> int:
        return self.positions.size


def row_block(rows: Int32[Array, "R W"]) -> Block:
    position = rows[:, POSITION, None]
    return Block(positions=jnp.maximum(position, 0), valid=position >= 0, pages=rows[:, ROW_PAGES:])


def tile_block(tiles: Int32[Array, "N X"], tile_tokens: int) -> Block:
    offsets = jnp.arange(tile_tokens)
    valid = (offsets >= tiles[:, FIRST, None]) & (offsets < tiles[:, LAST, None])
    return Block(positions=tiles[:, BASE, None] + offsets, valid=valid, pages=tiles[:, TILE_TOKENS + tile_tokens :])


def write_pages(chunk: Chunk, blocks: Sequence[Block], keys_values: Float[Array, "M 2 K d"]) -> Chunk:
    """Store the blocks' keys and values, M = queries of all blocks in order. What is not valid is dropped."""
    num_pages, page_tokens = chunk.shape[0], chunk.shape[3]
    pages, offsets = [], []
    for block in blocks:
        page = jnp.take_along_axis(block.pages, block.positions // page_tokens, axis=1, mode="clip")
        pages.append(jnp.where(block.valid, page, num_pages).ravel())
        offsets.append((block.positions % page_tokens).ravel())
    return chunk.at[jnp.concatenate(pages), :, :, jnp.concatenate(offsets)].set(keys_values, mode="drop")


def read_pages(chunk: Chunk, pages: Int32[Array, "B P"], part: int) -> Float[Array, "B K T d"]:
    """The keys (part 0) or values (part 1) of whole page lists, in the order of positions.

    One gather for each: cutting both out of one would copy them again.
    """
    num_pages, two, num_heads, page_tokens, head_dim = chunk.shape
    flat = chunk.reshape(num_pages * two * num_heads, page_tokens * head_dim)
    index = (pages[:, None, :] * two + part) * num_heads + jnp.arange(num_heads)[:, None]
    gathered = flat.at[index].get(mode="promise_in_bounds")
    return gathered.reshape(pages.shape[0], num_heads, pages.shape[1] * page_tokens, head_dim)


def attend_pages(q: Float[Array, "B Q H d"], chunk: Chunk, block: Block) -> Float[Array, "B Q H d"]:
    """Attention of each query over its sequence up to its own position; scores and softmax in float32."""
    keys, values = read_pages(chunk, block.pages, 0), read_pages(chunk, block.pages, 1)
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length = keys.shape[1], keys.shape[2]
    q = q.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("bqkgd,bktd->bkgqt", q, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
    visible = jnp.arange(length) <= block.positions[:, :, None]
    scores = jnp.where(visible[:, None, None], scores, MASKED_SCORE)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    out = jnp.einsum("bkgqt,bktd->bqkgd", weights, values)
    return out.reshape(batch, num_queries, num_heads, head_dim)


def attend_layer(
    chunks: list[Chunk], blocks: list[list[Block]], q: Float[Array, "M H d"], k: Float[Array, "M K d"], v: Float[Array, "M K d"]
) -> tuple[list[Chunk], Float[Array, "M H d"]]:
    """One layer of a step whose tokens lie kind by kind (rows, tiles), each kind chunk by chunk.

    Args:
        blocks: blocks[kind][chunk_idx].
    """
    keys_values = jnp.stack([k, v], axis=1)
    starts, start = [], 0
    for kind in blocks:
        starts.append(start)
        start += sum(block.num_queries for block in kind)
    outputs: list[list[Array]] = [[] for _ in blocks]
    written = []
    for chunk_idx, old_chunk in enumerate(chunks):
        spans = [
            slice(begin + chunk_idx * kind[0].num_queries, begin + (chunk_idx + 1) * kind[0].num_queries)
            for begin, kind in zip(starts, blocks, strict=True)
        ]
        own = [kind[chunk_idx] for kind in blocks]
        chunk = write_pages(old_chunk, own, jnp.concatenate([keys_values[span] for span in spans]))
        written.append(chunk)
        for kind_idx, (block, span) in enumerate(zip(own, spans, strict=True)):
            out = attend_pages(q[span].reshape(*block.positions.shape, *q.shape[1:]), chunk, block)
            outputs[kind_idx].append(out.reshape(-1, *q.shape[1:]))
    return written, jnp.concatenate([out for kind in outputs for out in kind])


def shard_attention(mesh: Mesh | None) -> Callable:
    """`attend_layer`, run on each device's own heads when there is a mesh: heads never look at each other."""
    if mesh is None:
        return attend_layer
    heads, pages = PartitionSpec(None, TENSOR_AXIS), PartitionSpec(None, None, TENSOR_AXIS)
    return jax.shard_map(attend_layer, mesh=mesh, in_specs=(pages, PartitionSpec(), heads, heads, heads), out_specs=(pages, heads))


def draw(logits: Float32[Array, "N V"], rows: Int32[Array, "N W"], *, max_top: int, with_options: bool) -> Drawn:
    """Sample one token per row as its columns say.

    Args:
        with_options: obey top-p, top-k and min-p, and fill the top `max_top`. Without, rows must not ask for them; equal draws.
    """

    def floats(column: int) -> Float32[Array, "N"]:
        return jax.lax.bitcast_convert_type(rows[:, column], jnp.float32)

    keys = jax.lax.bitcast_convert_type(rows[:, KEY:TEMPERATURE], jnp.uint32)
    temperatures = floats(TEMPERATURE)
    cuts = Cuts(top_p=floats(TOP_P), min_p=floats(MIN_P), top_k=rows[:, TOP_K]) if with_options else None
    token_ids, logprobs = sample_tokens(logits, keys, rows[:, DRAW], temperatures, cuts)
    top = top_logprobs(logits, temperatures, max_top if with_options else 0)
    return Drawn(token_ids=token_ids[:, None], logprobs=logprobs[:, None], top_token_ids=top[0], top_logprobs=top[1])


@functools.cache
def make_draw(*, max_top: int) -> Callable:
    """The jitted second half of a step in which some row uses an option: those programs sort, and few steps need them."""

    def draw_with_options(logits: Float32[Array, "N V"], rows: Int32[Array, "C R W"]) -> Drawn:
        return draw(logits, rows.reshape(-1, rows.shape[-1]), max_top=max_top, with_options=True)

    return jax.jit(draw_with_options)


@functools.cache
def make_step(
    graph: nnx.GraphDef, treedef: jax.tree_util.PyTreeDef, *, tile_tokens: int, max_draws: int, mesh: Mesh | None, vocab_size: int
) -> Callable:
    """The jitted step; it compiles once per combination of bucket sizes. Returns caches, tokens drawn without options, logits.

    With tiles each row draws once. Without, rows draw up to NUM_DRAWS times, at most `max_draws`, or until a stop token.
    Parameters come as a flat tuple: a tree of them would be walked in Python at every call. Engines of one model share programs.
    """
    attention = shard_attention(mesh)

    def forward(
        params: tuple[Array, ...], caches: Caches, rows: Int32[Array, "C R W"], tiles: Int32[Array, "C N X"]
    ) -> tuple[Caches, Float32[Array, "M V"]]:
        model: Qwen3 = nnx.merge(graph, jax.tree.unflatten(treedef, params))
        kinds = [[row_block(chunk_rows) for chunk_rows in rows]]
        token_ids = [rows[:, :, TOKEN].ravel()]
        if tiles.shape[1]:
            kinds.append([tile_block(chunk_tiles, tile_tokens) for chunk_tiles in tiles])
            token_ids.append(tiles[:, :, TILE_TOKENS : TILE_TOKENS + tile_tokens].ravel())
        positions = jnp.concatenate([block.positions.ravel() for kind in kinds for block in kind])
        caches = list(caches)

        def attend(layer_idx: int, q: Array, k: Array, v: Array) -> Array:
            caches[layer_idx], out = attention(caches[layer_idx], kinds, q[0], k[0], v[0])
            return out[None]

        hidden = model(jnp.concatenate(token_ids)[None], positions[None], attend)[0]
        if tiles.shape[1]:
            hidden = hidden[rows[:, :, SAMPLE_AT].ravel()]
        return caches, model.logits(hidden)

    def step(
        params: tuple[Array, ...], caches: Caches, rows: Int32[Array, "C R W"], tiles: Int32[Array, "C N X"]
    ) -> tuple[Caches, Drawn, Float32[Array, "M V"]]:
        if tiles.shape[1] or max_draws == 1:
            caches, logits = forward(params, caches, rows, tiles)
            return caches, draw(logits, rows.reshape(-1, rows.shape[-1]), max_top=0, with_options=False), logits

        def draws_more(carry: tuple) -> Bool[Array, ""]:
            draw_idx, _, rows, _, _ = carry
            return (draw_idx < max_draws) & jnp.any(rows[:, :, NUM_DRAWS] > 0)

        def draw_once(carry: tuple) -> tuple:
            draw_idx, caches, rows, drawn, _ = carry
            caches, logits = forward(params, caches, rows, tiles)
            flat_rows = rows.reshape(-1, rows.shape[-1])
            new = draw(logits, flat_rows, max_top=0, with_options=False)
            draws = flat_rows[:, NUM_DRAWS] > 0
            token_ids = jnp.where(draws, new.token_ids[:, 0], NO_TOKEN)
            drawn = dataclasses.replace(
                drawn,
                token_ids=drawn.token_ids.at[:, draw_idx].set(token_ids),
                logprobs=drawn.logprobs.at[:, draw_idx].set(new.logprobs[:, 0]),
            )
            return draw_idx + 1, caches, next_rows(flat_rows, token_ids).reshape(rows.shape), drawn, logits

        num_rows = rows.shape[0] * rows.shape[1]
        no_tokens = Drawn(
            token_ids=jnp.full((num_rows, max_draws), NO_TOKEN, jnp.int32),
            logprobs=jnp.zeros((num_rows, max_draws), jnp.float32),
            top_token_ids=jnp.zeros((num_rows, 0), jnp.int32),
            top_logprobs=jnp.zeros((num_rows, 0), jnp.float32),
        )
        no_logits = jnp.zeros((num_rows, vocab_size), jnp.float32)
        _, caches, _, drawn, logits = jax.lax.while_loop(draws_more, draw_once, (0, caches, rows, no_tokens, no_logits))
        return caches, drawn, logits

    return jax.jit(step, donate_argnums=1)


def next_rows(rows: Int32[Array, "N W"], token_ids: Int32[Array, "N"]) -> Int32[Array, "N W"]:
    """The rows that draw the token after `token_ids`; those that are done compute nothing any more."""
    stops = jnp.any(rows[:, STOPS:ROW_PAGES] == token_ids[:, None], axis=1)
    num_draws = jnp.where(stops, 0, rows[:, NUM_DRAWS] - 1)
    position = jnp.where(num_draws > 0, rows[:, POSITION] + 1, -1)
    changed = jnp.stack([token_ids, position, rows[:, SAMPLE_AT], rows[:, DRAW] + 1, num_draws], axis=1)
    return rows.at[:, TOKEN:KEY].set(changed)
