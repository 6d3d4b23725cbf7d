"""Weights and steps for `bench_transfer`: synthetic ones of a chosen density, and real ones from a few updates of a small model."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt16

Weights = dict[str, np.ndarray]

SYNTHETIC_SHAPE = (12_208, 4_096)
"""100 MB of bfloat16."""


def random_bits(size: int, seed: int) -> UInt16[np.ndarray, "N"]:
    """Bit patterns of normal bfloat16 weights of standard deviation 0.02; they repeat after 16 M elements."""
    rng = np.random.default_rng(seed)
    block = (0.02 * rng.standard_normal(min(size, 1 << 24), np.float32)).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.resize(block, size)


def changed_positions(size: int, share: float, rng: np.random.Generator) -> Shaped[np.ndarray, "n"]:
    """Positions that are each taken with probability `share`, sorted."""
    if share > 0.2:
        return np.flatnonzero(rng.random(size, np.float32) < share)
    gaps = rng.geometric(share, int(size * share * 1.1) + 100)
    positions = np.cumsum(gaps) - 1
    return positions[: np.searchsorted(positions, size)]


def step_by_one_code(bits: UInt16[np.ndarray, "N"], share: float, rng: np.random.Generator) -> None:
    """Move a random `share` of the elements one code up or down, in place."""
    for start in range(0, len(bits), 1 << 24):
        piece = bits[start : start + (1 << 24)]
        positions = changed_positions(len(piece), share, rng)
        piece[positions] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(positions))


def synthetic_pair(unchanged: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two versions of one 100 MB tensor: uniform positions, +-1 code."""
    old = random_bits(SYNTHETIC_SHAPE[0] * SYNTHETIC_SHAPE[1], seed)
    new = old.copy()
    step_by_one_code(new, 1 - unchanged, np.random.default_rng(seed + 1))
    as_weights = [bits.view(ml_dtypes.bfloat16).reshape(SYNTHETIC_SHAPE) for bits in (old, new)]
    return as_weights[0], as_weights[1]


def qwen3_shapes(num_layers: int, vocab_size: int, hidden: int = 1024, intermediate: int = 3072) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of a Qwen3; 28 layers and 151,936 words are the 0.6B model (1.2 GB in bfloat16)."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, hidden)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}self_attn.q_proj.weight"] = (2 * hidden, hidden)
        shapes[f"{prefix}self_attn.k_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}self_attn.v_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, 2 * hidden)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, intermediate)
    shapes["model.norm.weight"] = (hidden,)
    return shapes


def model_weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Weights:
    """The same weights for the same seed, in every process; all tensors lie in one block of memory."""
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    bits = random_bits(sum(sizes), seed)
    ends = np.cumsum(sizes)
    return {
        name: bits[end - size : end].view(ml_dtypes.bfloat16).reshape(shape)
        for (name, shape), size, end in zip(shapes.items(), sizes, ends, strict=True)
    }


def step_model(weights: Weights, share: float, seed: int) -> Weights:
    """A copy in which a random `share` of all elements moved by one code."""
    rng = np.random.default_rng(seed)
    stepped = {}
    for name, array in weights.items():
        stepped[name] = array.copy()
        step_by_one_code(stepped[name].reshape(-1).view(np.uint16), share, rng)
    return stepped


def real_updates(lr: float, *, num_updates: int = 3, warm_updates: int = 3) -> Iterator[tuple[Weights, Weights]]:
    """Pairs of consecutive published versions of a 22 M parameter model: float32 master, AdamW, published in bfloat16.

    The text is a noisy first-order Markov chain over 8,192 words: it has something to learn, and gradients of every size.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from rose_jax.export import named_tensors
    from rose_jax.models.qwen3 import Qwen3, sequence_logprobs
    from rose_jax.models.qwen3_config import Qwen3Config

    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=384,
        num_layers=8,
        num_heads=6,
        num_kv_heads=6,
        head_dim=64,
        intermediate_size=1536,
        tie_word_embeddings=True,
    )
    graph, params = nnx.split(Qwen3(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(lr, b2=0.99)

    @jax.jit
    def update(params: nnx.State, state: optax.OptState, tokens: jax.Array) -> tuple[nnx.State, optax.OptState]:
        def loss(params: nnx.State) -> jax.Array:
            logprobs, _ = sequence_logprobs(nnx.merge(graph, params), tokens, chunk_tokens=1024, remat=False)
            return -jnp.mean(logprobs[:, 1:])

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    def published(params: nnx.State) -> Weights:
        return {name: np.array(tensor.astype(jnp.bfloat16)) for name, tensor in named_tensors(params)}

    rng = np.random.default_rng(0)
    successor = rng.permutation(config.vocab_size)
    state = optimizer.init(params)
    before: Weights | None = None
    for update_idx in range(warm_updates + num_updates):
        tokens = [rng.integers(0, config.vocab_size, 4)]
        for _ in range(63):
            random = rng.integers(0, config.vocab_size, 4)
            tokens.append(np.where(rng.random(4) < 0.2, random, successor[tokens[-1]]))
        params, state = update(params, state, jnp.asarray(np.stack(tokens, 1)))
        after = published(params) if update_idx >= warm_updates - 1 else None
        if before is not None and after is not None:
            yield before, after
        before = after
