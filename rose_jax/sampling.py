"""Drawing tokens on the device. The draw of a token depends on its SamplingKey and position alone.

Invariant: whatever slot, batch or replica a request runs in, equal logits give equal tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt32

from common.types import SamplingKey

KEY_WORDS = 3


def key_words(key: SamplingKey) -> UInt32[np.ndarray, "3"]:
    """A SamplingKey as the words that `sample_tokens` folds in.

    Raises:
        ValueError: a part does not fit 32 bits.
    """
    parts = (key.run_seed, key.trajectory_id, key.turn_idx)
    if any(not 0 <= part < 2**32 for part in parts):
        raise ValueError(f"{key}: each part must lie in [0, 2**32)")
    return np.array(parts, np.uint32)


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 3"],
    positions: Int32[Array, "B"],
    temperatures: Float32[Array, "B"],
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Draw one token per row by the Gumbel-max trick; temperature 0 takes the most probable one.

    Args:
        keys: rows of `key_words`.
        positions: number of tokens already sampled for the row's request.
    Returns:
        Tokens and their log-probabilities as SamplingParams defines them.
    """
    greedy = temperatures == 0.0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperatures)[:, None]

    def gumbel(words: UInt32[Array, "3"], position: Int32[Array, ""]) -> Float32[Array, "V"]:
        key = jax.random.key(0)
        for word_idx in range(KEY_WORDS):
            key = jax.random.fold_in(key, words[word_idx])
        return jax.random.gumbel(jax.random.fold_in(key, position), (logits.shape[-1],))

    noise = jax.vmap(gumbel)(keys, positions)
    tokens = jnp.argmax(jnp.where(greedy[:, None], scaled, scaled + noise), axis=-1)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    return tokens.astype(jnp.int32), jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
