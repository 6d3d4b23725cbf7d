"""The engine behind the signatures of JetStream's last development version: `prefill` returns a first token too.

A thin adapter over Qwen3Engine: the first token is drawn by one decode on the prefix, so that what a driver then inserts goes on
from there. Everything else is passed through.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from rose_jax.jetstream.engine_api import DecodeState, Params, Prefix, Qwen3Engine, ResultTokens, Sampler
from rose_jax.jetstream.step_inputs import ROW_PAGES


class HeadQwen3Engine(Qwen3Engine):
    """See the module."""

    def prefill(  # type: ignore[override]
        self,
        *,
        params: Params,
        existing_prefix: Prefix | None = None,
        padded_tokens: Int32[Array, "L"],
        true_length: int,
        sampler: Sampler | None = None,
    ) -> tuple[Prefix, ResultTokens]:
        """The prompt's state after its first completion token was drawn, and that token."""
        prefix = super().prefill(
            params=params, existing_prefix=existing_prefix, padded_tokens=padded_tokens, true_length=true_length
        )
        own_pages = np.arange(prefix.layers[0].shape[0], dtype=np.int32)
        row = prefix.row.at[ROW_PAGES : ROW_PAGES + len(own_pages)].set(own_pages)[None, : ROW_PAGES + len(own_pages)]
        state, first_token = self.generate(params, DecodeState(layers=prefix.layers, rows=row), sampler)
        padding = (0, prefix.row.shape[0] - state.rows.shape[1])
        return Prefix(layers=state.layers, row=jnp.pad(state.rows[0], padding)), first_token

    def free_resource(self, slot: int) -> None:
        """Nothing to do: a slot's pages are its own, and `insert` overwrites them."""
        del slot
