"""The share of unchanged elements counts bits of bfloat16."""

import jax.numpy as jnp
import pytest
from flax import nnx

from rose_jax.density import unchanged_share


def _params(matrix: list[float], norm: list[float]) -> nnx.State:
    return nnx.State({"matrix": nnx.Param(jnp.array(matrix)), "norm": nnx.Param(jnp.array(norm))})


def test_equal_versions_are_unchanged_throughout() -> None:
    params = _params([1.0, 2.0, float("nan")], [1.0])
    assert unchanged_share(params, params) == {"bf16_unchanged_share": 1.0, "bf16_unchanged_share_min": 1.0}


def test_only_changes_that_bfloat16_sees_count() -> None:
    old = _params([1.0, 2.0, 3.0, 0.0], [1.0])
    new = _params([1.0 + 1e-4, 2.0 + 1e-1, 3.0, -0.0], [1.0])  # the first is below bfloat16's precision, the last flips a sign
    shares = unchanged_share(old, new)
    assert shares["bf16_unchanged_share"] == pytest.approx(3 / 5)
    assert shares["bf16_unchanged_share_min"] == pytest.approx(2 / 4)
