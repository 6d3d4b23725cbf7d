"""The step of invariant mode: one tile at a time, always in the same shape, so that nothing else can touch its bits.

A tile is `tile_tokens` positions of one sequence aligned to absolute positions; a decoded token runs in the tile its position lies
in, the other rows computing into the void. A token's keys, values and log-probability are thus the same arithmetic on the same
operands in the same place of the same program, whatever is in the batch and however the work was cut; the tiles of a step run one
after the other in a loop whose length is data. The price: a decode costs a whole tile, and tiles share no matrix product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int32

from rose_jax.jetstream.compute import Caches, Drawn, draw, shard_attention, tile_block
from rose_jax.jetstream.step_inputs import SAMPLE_AT, TILE_TOKENS
from rose_jax.models.qwen3 import Qwen3


@functools.cache
def make_invariant_step(
    graph: nnx.GraphDef, treedef: jax.tree_util.PyTreeDef, *, tile_tokens: int, max_top: int, mesh: Mesh | None
) -> Callable:
    """The jitted step over (params, caches, rows, tiles, num_units); one program for each number of chunks."""
    attention = shard_attention(mesh)

    def run_unit(model: Qwen3, layers: list[Array], row: Int32[Array, "W"], tile: Int32[Array, "X"]) -> tuple[list[Array], Drawn]:
        layers = list(layers)
        block = tile_block(tile[None], tile_tokens)

        def attend(layer_idx: int, q: Array, k: Array, v: Array) -> Array:
            (layers[layer_idx],), out = attention([layers[layer_idx]], [[block]], q[0], k[0], v[0])
            return out[None]

        hidden = model(tile[None, TILE_TOKENS : TILE_TOKENS + tile_tokens], block.positions, attend)[0]
        last = jax.lax.dynamic_slice_in_dim(hidden, row[SAMPLE_AT], 1)
        return layers, draw(model.logits(last), row[None], max_top=max_top, with_options=True)

    def step(
        params: tuple[Array, ...],
        caches: Caches,
        rows: Int32[Array, "C N W"],
        tiles: Int32[Array, "C N X"],
        num_units: Int32[Array, "C"],
    ) -> tuple[Caches, Drawn]:
        model: Qwen3 = nnx.merge(graph, jax.tree.unflatten(treedef, params))
        num_rows = rows.shape[1]
        per_chunk, new_caches = [], []
        for chunk_idx in range(rows.shape[0]):

            def run(unit: Array, carry: tuple[list[Array], Drawn], chunk_idx: int = chunk_idx) -> tuple[list[Array], Drawn]:
                layers, drawn = carry
                layers, new = run_unit(model, layers, rows[chunk_idx, unit], tiles[chunk_idx, unit])
                return layers, jax.tree.map(lambda all_units, one: all_units.at[unit].set(one[0]), drawn, new)

            nothing = Drawn(
                token_ids=jnp.zeros((num_rows, 1), jnp.int32),
                logprobs=jnp.zeros((num_rows, 1), jnp.float32),
                top_token_ids=jnp.zeros((num_rows, max_top), jnp.int32),
                top_logprobs=jnp.zeros((num_rows, max_top), jnp.float32),
            )
            layers = [chunks[chunk_idx] for chunks in caches]
            layers, drawn = jax.lax.fori_loop(0, num_units[chunk_idx], run, (layers, nothing))
            new_caches.append(layers)
            per_chunk.append(drawn)
        drawn = jax.tree.map(lambda *parts: jnp.concatenate(parts), *per_chunk)
        return [list(chunks) for chunks in zip(*new_caches, strict=True)], drawn

    return jax.jit(step, donate_argnums=1)
