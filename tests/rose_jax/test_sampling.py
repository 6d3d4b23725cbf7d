"""Draws: determined by key and position, distributed as the logits say, cut as asked."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from common.types import SamplingKey
from rose_jax.sampling import Cuts, apply_cuts, gumbel_noise, key_words, sample_tokens, top_logprobs

LOGITS = np.log(np.array([[0.05, 0.4, 0.3, 0.15, 0.1]], np.float32))


def keys(count: int, *, run_seed: int = 0) -> jnp.ndarray:
    return jnp.asarray(np.stack([key_words(SamplingKey(run_seed=run_seed, trajectory_id=idx, turn_idx=0)) for idx in range(count)]))


def make_cuts(top_p: float = 1.0, min_p: float = 0.0, top_k: int = LOGITS.shape[1]) -> Cuts:
    return Cuts(top_p=jnp.array([top_p], jnp.float32), min_p=jnp.array([min_p], jnp.float32), top_k=jnp.array([top_k], jnp.int32))


def test_draws_follow_the_distribution_at_their_temperature() -> None:
    num_draws = 20_000
    logits = jnp.broadcast_to(jnp.asarray(LOGITS), (num_draws, LOGITS.shape[1]))
    drawn, logprobs = sample_tokens(
        logits, jnp.broadcast_to(keys(1), (num_draws, 2)), jnp.arange(num_draws), jnp.full(num_draws, 0.5)
    )
    expected = np.exp(LOGITS[0] / 0.5) / np.exp(LOGITS[0] / 0.5).sum()
    counts = np.bincount(np.asarray(drawn), minlength=5) / num_draws
    np.testing.assert_allclose(counts, expected, atol=4 * 0.5 / num_draws**0.5)
    np.testing.assert_allclose(np.exp(logprobs), expected[np.asarray(drawn)], rtol=1e-5)


def test_noise_is_standard_gumbel_and_differs_by_key_position_and_token() -> None:
    noise = np.asarray(gumbel_noise(keys(300), jnp.arange(300), 101))
    assert abs(noise.mean() - np.euler_gamma) < 0.03
    assert abs(noise.std() - np.pi / 6**0.5) < 0.03
    assert np.isfinite(noise).all()
    assert len(np.unique(noise)) > 0.99 * noise.size
    same = np.asarray(gumbel_noise(keys(300)[7:8], jnp.array([7]), 101))
    np.testing.assert_array_equal(same[0], noise[7])


def test_key_words_tell_every_part_of_a_key_apart() -> None:
    parts = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32 - 1, 5, 3)]
    words = {
        key_words(SamplingKey(run_seed=seed, trajectory_id=trajectory, turn_idx=turn)).tobytes() for seed, trajectory, turn in parts
    }
    assert len(words) == len(parts)
    with pytest.raises(ValueError, match="2\\*\\*32"):
        key_words(SamplingKey(run_seed=2**32, trajectory_id=0, turn_idx=0))


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        (make_cuts(), [0, 1, 2, 3, 4]),
        (make_cuts(top_k=2), [1, 2]),
        (make_cuts(top_p=0.69), [1, 2]),
        (make_cuts(top_p=0.71), [1, 2, 3]),
        (make_cuts(top_p=1e-9), [1]),
        (make_cuts(min_p=0.3), [1, 2, 3]),
        (make_cuts(top_k=3, top_p=0.8), [1, 2]),  # 0.3 and 0.4 are 0.82 of the three
        (make_cuts(min_p=1.0), [1]),
    ],
)
def test_cuts_keep_what_they_say(cuts: Cuts, kept: list[int]) -> None:
    allowed = np.asarray(apply_cuts(jnp.asarray(LOGITS), cuts))[0]
    assert np.flatnonzero(np.isfinite(allowed)).tolist() == kept
    np.testing.assert_array_equal(allowed[kept], LOGITS[0, kept])


def test_cutting_nothing_draws_the_same_tokens() -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(64, 33)).astype(np.float32))
    nothing = Cuts(top_p=jnp.ones(64), min_p=jnp.zeros(64), top_k=jnp.full(64, 33))
    arguments = (logits, keys(64), jnp.arange(64), jnp.ones(64))
    np.testing.assert_array_equal(sample_tokens(*arguments)[0], sample_tokens(*arguments, nothing)[0])


def test_temperature_zero_is_greedy_with_logprobs_at_one() -> None:
    drawn, logprobs = sample_tokens(jnp.asarray(LOGITS), keys(1), jnp.array([3]), jnp.array([0.0]))
    assert drawn.tolist() == [1]
    assert logprobs[0] == pytest.approx(np.log(0.4), abs=1e-6)
    ids, values = top_logprobs(jnp.asarray(LOGITS), jnp.array([0.0]), 2)
    assert ids.tolist() == [[1, 2]]
    np.testing.assert_allclose(np.exp(values), [[0.4, 0.3]], rtol=1e-6)
