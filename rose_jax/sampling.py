"""Drawing tokens on the device. The draw of a token depends on its SamplingKey and position alone.

Random words are a counter-based function (Threefry-2x32, Salmon et al. 2011) of key, position and token id: nothing is carried from
draw to draw. Invariant: whatever slot, batch or replica a request runs in, equal logits give equal tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float, Float32, Int32, UInt32

from common.types import SamplingKey

KEY_WORDS = 2
UNIFORM_BITS = 23
"""With half a step added, so that 0 and 1 are never drawn, a float32 still holds these exactly."""


def key_words(key: SamplingKey) -> UInt32[np.ndarray, "2"]:
    """A SamplingKey mixed into the two words of a Threefry key; once per request, on the host.

    Raises:
        ValueError: a part does not fit 32 bits.
    """
    parts = (key.run_seed, key.trajectory_id, key.turn_idx)
    if any(not 0 <= part < 2**32 for part in parts):
        raise ValueError(f"{key}: each part must lie in [0, 2**32)")
    digest = hashlib.blake2b(np.array(parts, "<u4").tobytes(), digest_size=4 * KEY_WORDS).digest()
    return np.frombuffer(digest, "<u4").astype(np.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cuts:
    """What may be drawn at all, per row: the top_k most probable tokens; of those the smallest set that holds top_p of their
    probability; of those the ones at least min_p times as probable as the best. top_k = V, top_p = 1, min_p = 0 cut nothing."""

    top_p: Float32[Array, "B"]
    min_p: Float32[Array, "B"]
    top_k: Int32[Array, "B"]


def apply_cuts(logits: Float32[Array, "B V"], cuts: Cuts) -> Float32[Array, "B V"]:
    """Minus infinity where a token may not be drawn; of equal logits the lower token id counts as the more probable."""
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    within_k = jnp.arange(logits.shape[-1]) < cuts.top_k[:, None]
    probabilities = jax.nn.softmax(jnp.where(within_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    # A cumulative sum rounds: without the second test top_p = 1 could lose tokens.
    within_p = (before < cuts.top_p[:, None]) | (cuts.top_p[:, None] >= 1.0)
    within_min = probabilities >= cuts.min_p[:, None] * probabilities[:, :1]
    kept = (within_k & within_p & within_min).at[:, 0].set(True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.where(jnp.take_along_axis(kept, rank, axis=-1), logits, -jnp.inf)


def gumbel_noise(keys: UInt32[Array, "B 2"], positions: Int32[Array, "B"], vocab_size: int) -> Float32[Array, "B V"]:
    """Standard Gumbel noise for every token id."""
    half = -(-vocab_size // 2)  # each counter yields two words
    token_counters = jnp.arange(half, dtype=jnp.uint32)

    def words(key: UInt32[Array, "2"], position: UInt32[Array, ""]) -> UInt32[Array, "V"]:
        counters = jnp.concatenate([jnp.broadcast_to(position, half), token_counters])
        return threefry_2x32((key[0], key[1]), counters)[:vocab_size]

    bits = jax.vmap(words)(keys, positions.astype(jnp.uint32)) >> (32 - UNIFORM_BITS)
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-UNIFORM_BITS
    return -jnp.log(-jnp.log(uniform))


def temper(logits: Float[Array, "B V"], temperatures: Float32[Array, "B"]) -> Float32[Array, "B V"]:
    """Logits of the distribution whose log-probabilities count: at temperature 1 for greedy rows."""
    return logits.astype(jnp.float32) / jnp.where(temperatures == 0.0, 1.0, temperatures)[:, None]


def sample_tokens(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    positions: Int32[Array, "B"],
    temperatures: Float32[Array, "B"],
    cuts: Cuts | None = None,
) -> tuple[Int32[Array, "B"], Float32[Array, "B"]]:
    """Draw one token per row by the Gumbel-max trick; temperature 0 takes the most probable one.

    Args:
        keys: rows of `key_words`.
        positions: number of tokens already sampled for the row's request.
    Returns:
        Tokens and their log-probabilities as SamplingParams defines them.
    """
    scaled = temper(logits, temperatures)
    allowed = scaled if cuts is None else apply_cuts(scaled, cuts)
    noise = jnp.where(temperatures[:, None] == 0.0, 0.0, gumbel_noise(keys, positions, logits.shape[-1]))
    tokens = jnp.argmax(allowed + noise, axis=-1)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    return tokens.astype(jnp.int32), jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def top_logprobs(
    logits: Float[Array, "B V"], temperatures: Float32[Array, "B"], num_top: int
) -> tuple[Int32[Array, "B M"], Float32[Array, "B M"]]:
    """The `num_top` most probable tokens of each row, best first, with log-probabilities as SamplingParams defines them."""
    values, token_ids = jax.lax.top_k(jax.nn.log_softmax(temper(logits, temperatures), axis=-1), num_top)
    return token_ids.astype(jnp.int32), values
