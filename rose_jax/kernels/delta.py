"""Change detection and apply on the device that holds the weights, so that only changed elements cross to the host and back.

`find_changes` compacts without a sort, a scatter over all elements or a value that the host must wait for: blocks of elements are
counted, each output slot finds its block by binary search in the running counts, and its place within the block by a running sum
over that block alone. Shapes depend on the array and on `capacity` only, so updates of one array with one capacity trace once; take
capacities from `capacity_for`. Beyond a few percent of changes whole values are cheaper: then do not call it.

Everything works on bit patterns, so NaN payloads and -0 are values like any other. Arrays of 2^31 elements or more are refused.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

BLOCK_ELEMENTS = 128
"""One lane row of a TPU register; also what one output slot looks through."""
MIN_CAPACITY = 1024

Changes = tuple[Int32[Array, ""], Int32[Array, "C"], Shaped[Array, "C"]]


def capacity_for(num_changed: int) -> int:
    """A power of two with room for `num_changed`: a run of updates needs few distinct ones."""
    return max(MIN_CAPACITY, 1 << (num_changed - 1).bit_length())


def to_bits(array: Shaped[Array, "..."]) -> Shaped[Array, "N"]:
    """Flat unsigned bit patterns of the array's own width."""
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}")).reshape(-1)


def find_changes_reference(old: Shaped[Array, "..."], new: Shaped[Array, "..."], *, capacity: int) -> Changes:
    """How many elements differ, their flat positions in order and their new bits, padded to `capacity` with position N.

    If more than `capacity` differ the count says so and the rest is the first `capacity` of them.
    """
    _check(old, new)
    old_bits, new_bits = to_bits(old), to_bits(new)
    differs = old_bits != new_bits
    (positions,) = jnp.nonzero(differs, size=capacity, fill_value=old_bits.size)
    bits = jnp.append(new_bits, jnp.zeros(1, new_bits.dtype))[positions]
    return jnp.sum(differs, dtype=jnp.int32), positions.astype(jnp.int32), bits


@functools.partial(jax.jit, static_argnames="capacity")
def find_changes(old: Shaped[Array, "..."], new: Shaped[Array, "..."], *, capacity: int) -> Changes:
    """See find_changes_reference."""
    _check(old, new)
    size = old.size
    old_bits, new_bits = to_bits(old), to_bits(new)
    if size == 0:
        return jnp.int32(0), jnp.zeros(capacity, jnp.int32), jnp.zeros(capacity, new_bits.dtype)
    padding = -size % BLOCK_ELEMENTS
    differs = jnp.pad(old_bits != new_bits, (0, padding)).reshape(-1, BLOCK_ELEMENTS)
    ends = jnp.cumsum(jnp.sum(differs, axis=1, dtype=jnp.int32))
    slot = jnp.arange(capacity, dtype=jnp.int32)
    block = jnp.minimum(jnp.searchsorted(ends, slot, side="right"), len(ends) - 1).astype(jnp.int32)
    rows = differs[block]
    rank = slot - (ends[block] - jnp.sum(rows, axis=1, dtype=jnp.int32))
    # In the row, the wanted element is preceded by as many as have a running count of at most `rank`.
    within = jnp.sum(jnp.cumsum(rows, axis=1, dtype=jnp.int32) <= rank[:, None], axis=1, dtype=jnp.int32)
    positions = jnp.where(slot < ends[-1], block * BLOCK_ELEMENTS + within, size)
    return ends[-1], positions, new_bits.at[positions].get(mode="fill", fill_value=0)


def apply_changes_reference(weights: Shaped[Array, "..."], positions: Int32[Array, "C"], bits: Shaped[Array, "C"]) -> Array:
    """The weights with new bits at flat positions; positions of N (padding) write nothing. Twice equals once."""
    flat = to_bits(weights)
    padded = jnp.append(flat, jnp.zeros(1, flat.dtype))
    return _from_bits(padded.at[positions].set(bits)[:-1], weights)


@functools.partial(jax.jit, donate_argnums=0)
def apply_changes(weights: Shaped[Array, "..."], positions: Int32[Array, "C"], bits: Shaped[Array, "C"]) -> Array:
    """See apply_changes_reference. Positions are sorted, as find_changes gives them. Takes the memory of `weights` over."""
    updated = to_bits(weights).at[positions].set(bits, mode="drop", indices_are_sorted=True)
    return _from_bits(updated, weights)


def _from_bits(bits: Shaped[Array, "N"], like: Shaped[Array, "..."]) -> Array:
    return jax.lax.bitcast_convert_type(bits.reshape(like.shape), like.dtype)


def _check(old: Shaped[Array, "..."], new: Shaped[Array, "..."]) -> None:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"old is {old.dtype}{list(old.shape)}, new is {new.dtype}{list(new.shape)}: they must be alike")
    if math.prod(old.shape) >= 1 << 31:
        raise ValueError(f"an array of shape {list(old.shape)} has 2^31 elements or more; compare it shard by shard")
