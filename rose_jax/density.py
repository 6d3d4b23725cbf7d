"""How many weights a step left exactly as they were, counted in bfloat16: what a sparse weight diff does not have to carry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array


@jax.jit
def _counts(old: nnx.State, new: nnx.State) -> list[Array]:
    def count(before: Array, after: Array) -> Array:
        # Bits are compared: -0.0 and 0.0 are different weights to whoever holds a copy, and a NaN equals itself.
        as_bits = [jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16) for value in (before, after)]
        return jnp.sum(as_bits[0] == as_bits[1], dtype=jnp.float32)

    return jax.tree.leaves(jax.tree.map(count, old, new))


def unchanged_share(old: nnx.State, new: nnx.State) -> dict[str, float]:
    """Share of bit-identical bfloat16 elements between two versions: overall, and that of the tensor that changed most.

    Returns:
        bf16_unchanged_share and bf16_unchanged_share_min, both in [0, 1].
    """
    sizes = [leaf.size for leaf in jax.tree.leaves(new)]
    counts = [float(count) for count in jax.device_get(_counts(old, new))]
    shares = [count / size for count, size in zip(counts, sizes, strict=True)]
    return {"bf16_unchanged_share": sum(counts) / sum(sizes), "bf16_unchanged_share_min": min(shares)}
