"""Small models to send about, and steps that change them as training does."""

import numpy as np

from common.transfer.bits import BITS_DTYPES, DTYPES, flat_bits

Weights = dict[str, np.ndarray]


def make_model(seed: int = 0, *, width: int = 96, dtype: str = "bfloat16") -> Weights:
    """A few tensors of every kind: column- and row-parallel, vectors, a scalar, an empty one, float32 beside `dtype`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, dtype: str = dtype) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.02).astype(np.float32).astype(DTYPES[dtype])

    return {
        "model.embed_tokens.weight": normal(5 * width, width),
        "model.layers.0.input_layernorm.weight": normal(width),
        "model.layers.0.self_attn.q_proj.weight": normal(2 * width, width),
        "model.layers.0.self_attn.o_proj.weight": normal(width, 2 * width),
        "model.layers.0.mlp.experts": normal(3, width, 16),
        "model.layers.0.mlp.down_proj.weight": normal(width, 4 * width),
        "scale": normal(dtype="float32"),
        "unused": normal(0, 4),
    }


def small_step(weights: Weights, seed: int, *, share: float = 0.02) -> Weights:
    """A copy in which about `share` of the elements of each tensor moved by one code."""
    rng = np.random.default_rng(seed)
    stepped = {}
    for name, array in weights.items():
        new = array.copy()
        bits = flat_bits(new)
        moved = rng.random(bits.size) < share
        bits[moved] += rng.choice(np.array([1, -1]), int(moved.sum())).astype(BITS_DTYPES[array.dtype.name])
        stepped[name] = new
    return stepped


def blank(weights: Weights) -> Weights:
    """Arrays of the same shapes full of zeros: a replica before its first version."""
    return {name: np.zeros_like(array) for name, array in weights.items()}


def assert_equal_bits(got: Weights, expected: Weights) -> None:
    for name, array in expected.items():
        assert got[name].tobytes() == array.tobytes(), name
