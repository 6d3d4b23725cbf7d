"""The language model inside FakeEngine: a hash of the whole context picks a row of next-token logits from a small table.

Pure numpy, no state of its own. What a real engine caches per position (keys and values) is here one 64-bit number per
position, made from the one before it and the token, so that a wrong slot, a gap between chunks or a missing token changes
every later token.
Invariant: a draw depends on the weights, the context, the SamplingParams, the SamplingKey and the position, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float32, Float64

from common.types import SamplingKey, SamplingParams

FakeWeights = Mapping[str, np.ndarray]
"""{"table": float32 [rows, V], "bias": float32 [V]}."""

EMPTY_CONTEXT = 0x9E3779B97F4A7C15
"""The hash before the first token."""
_MASK = (1 << 64) - 1


def make_weights(seed: int, vocab_size: int, num_rows: int = 64) -> dict[str, np.ndarray]:
    """Random weights; logits have a spread of about 2, so that sampling varies and greedy decoding has no ties."""
    rng = np.random.default_rng(seed)
    table = rng.normal(scale=2.0, size=(num_rows, vocab_size)).astype(np.float32)
    return {"table": table, "bias": rng.normal(scale=0.5, size=vocab_size).astype(np.float32)}


def check_weights(weights: FakeWeights, like: FakeWeights) -> None:
    """Raises ValueError unless `weights` has the names, shapes and dtypes of `like` and finite values."""
    if set(weights) != set(like):
        raise ValueError(f"weights are named {sorted(weights)}, this model needs {sorted(like)}")
    for name, expected in like.items():
        given = weights[name]
        if given.shape != expected.shape or given.dtype != expected.dtype:
            raise ValueError(f"weight {name!r} is {given.dtype}{list(given.shape)}, needs {expected.dtype}{list(expected.shape)}")
        if not np.isfinite(given).all():
            raise ValueError(f"weight {name!r} holds values that are not finite")


def mix64(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64: Steele, Lea, Flood 2014)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def extend_context(context_hash: int, token_ids: Sequence[int]) -> list[int]:
    """The hash after each of `token_ids`, in order."""
    hashes = []
    for token_id in token_ids:
        context_hash = mix64((context_hash + (token_id + 1) * 0xD1342543DE82EF95) & _MASK)
        hashes.append(context_hash)
    return hashes


def next_token_logits(weights: FakeWeights, context_hash: int) -> Float32[np.ndarray, "V"]:
    table = weights["table"]
    return table[context_hash % table.shape[0]] + weights["bias"]


def uniform_draw(key: SamplingKey, position: int) -> float:
    """A number in [0, 1) for one token of one request."""
    state = 0
    for part in (key.run_seed, key.trajectory_id, key.turn_idx, position):
        state = mix64((state * 0x9E3779B97F4A7C15 + part + 1) & _MASK)
    return (state >> 11) / (1 << 53)


def draw_token(logits: Float32[np.ndarray, "V"], params: SamplingParams, draw: float) -> tuple[int, Float64[np.ndarray, "V"]]:
    """Choose a token, and the log-probabilities that SamplingParams defines for the whole vocabulary.

    Args:
        draw: from `uniform_draw`; greedy decoding ignores it.
    """
    temperature = params.temperature or 1.0
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max()
    logprobs = scaled - np.log(np.exp(scaled).sum())
    if params.temperature == 0.0:
        return int(np.argmax(logprobs)), logprobs
    order = np.argsort(-logprobs, kind="stable")
    probs = np.exp(logprobs[order])
    allowed = probs >= params.min_p * probs[0]
    allowed &= np.cumsum(probs) - probs < params.top_p
    if params.top_k is not None:
        allowed[params.top_k :] = False
    kept = np.cumsum(np.where(allowed, probs, 0.0))
    rank = int(np.searchsorted(kept, draw * kept[-1], side="right"))
    return int(order[min(rank, int(np.flatnonzero(allowed)[-1]))]), logprobs


def token_text(token_id: int) -> str:
    """What a token reads as, for stop strings: a, b, ..., z, ba, bb, ..."""
    letters = ""
    while True:
        token_id, letter_idx = divmod(token_id, 26)
        letters = chr(ord("a") + letter_idx) + letters
        if token_id == 0:
            return letters
