"""The jitted kernels against their references, and the promise that updates do not trace again."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rose_jax.kernels import delta

DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"]


def pair(dtype: str, shape: tuple[int, ...], share: float, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Random bit patterns, NaNs included, and a copy in which about `share` of them differ."""
    rng = np.random.default_rng(seed)
    width = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    old = rng.integers(0, 1 << 8 * width, shape).astype(f"u{width}")
    new = np.where(rng.random(shape) < share, rng.integers(0, 1 << 8 * width, shape).astype(f"u{width}"), old)
    as_dtype = [jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.dtype(dtype)) for bits in (old, new)]
    return as_dtype[0], as_dtype[1]


def bits(array: jax.Array) -> np.ndarray:
    return np.asarray(delta.to_bits(array))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "share"), [((300, 37), 0.02), ((128,), 1.0), ((), 1.0), ((0, 4), 0.5)])
def test_found_changes_equal_the_reference_and_apply_to_the_new_weights(dtype: str, shape: tuple[int, ...], share: float) -> None:
    old, new = pair(dtype, shape, share)
    found = delta.find_changes(old, new, capacity=1024)
    for got, expected in zip(found, delta.find_changes_reference(old, new, capacity=1024), strict=True):
        np.testing.assert_array_equal(got, expected)
    expected_bits = bits(new)
    once_reference = delta.apply_changes_reference(old, *found[1:])
    np.testing.assert_array_equal(bits(once_reference), expected_bits)
    once = delta.apply_changes(old, *found[1:])
    np.testing.assert_array_equal(bits(once), expected_bits)
    np.testing.assert_array_equal(bits(delta.apply_changes(once, *found[1:])), expected_bits)


def test_more_changes_than_room_are_counted() -> None:
    old, new = pair("bfloat16", (300, 100), 0.5)
    count, positions, _ = delta.find_changes(old, new, capacity=1024)
    changed = np.flatnonzero(bits(old) != bits(new))
    assert int(count) == len(changed) > 1024
    np.testing.assert_array_equal(positions, changed[:1024])


def test_one_update_after_another_traces_once() -> None:
    def update(seed: int) -> None:
        old, new = pair("bfloat16", (400, 50), 0.01, seed)
        _, positions, new_bits = delta.find_changes(old, new, capacity=delta.capacity_for(200))
        delta.apply_changes(old, positions, new_bits)

    update(0)
    before = delta.find_changes._cache_size(), delta.apply_changes._cache_size()
    for seed in range(1, 5):
        update(seed)
    assert (delta.find_changes._cache_size(), delta.apply_changes._cache_size()) == before


def test_capacities_are_few() -> None:
    assert delta.capacity_for(0) == delta.capacity_for(1024) == 1024
    assert delta.capacity_for(1025) == delta.capacity_for(2048) == 2048


def test_arrays_that_are_not_alike_are_refused() -> None:
    with pytest.raises(ValueError, match="alike"):
        delta.find_changes(jnp.zeros(4), jnp.zeros(5), capacity=8)
