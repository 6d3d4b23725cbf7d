"""Losses and their gradients equal a plain numpy oracle in float64, and the parts of a minibatch add up to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import AGGREGATIONS, GrpoConfig
from rose_jax.batching import Batch
from rose_jax.losses import BatchTotals, batch_totals, grpo_loss, supervised_loss

NUM_ROWS, NUM_TOKENS = 6, 10


def _rows(seed: int = 0) -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch whose ratios fall below, into and above the clip range under both signs of the advantage; row 4 is padding."""
    rng = np.random.default_rng(seed)
    mask = rng.random((NUM_ROWS, NUM_TOKENS)) < 0.6
    mask[:, 0] = False
    mask[4] = False
    behavior = -rng.gamma(2.0, 1.0, mask.shape)
    logprobs = behavior + rng.normal(0, 0.5, mask.shape)
    reference = behavior + rng.normal(0, 0.5, mask.shape)
    behavior[~mask] = 77.0  # must not matter
    advantages = np.array([1.0, -1.0, 0.5, -2.0, 3.0, 0.0])
    batch = Batch(
        token_ids=np.zeros(mask.shape, np.int32),
        loss_mask=mask,
        behavior_logprobs=behavior.astype(np.float32),
        advantages=advantages.astype(np.float32),
    )
    return batch, logprobs.astype(np.float32), reference.astype(np.float32)


def _oracle(batch: Batch, logprobs: np.ndarray, reference: np.ndarray, config: GrpoConfig) -> tuple[float, np.ndarray]:
    """Loss and its gradient with respect to the log-probabilities, token by token, in float64."""
    mask = np.asarray(batch.loss_mask)
    num_tokens, num_rows = mask.sum(), mask.any(axis=1).sum()
    loss, grad = 0.0, np.zeros(mask.shape)
    for row, token in np.argwhere(mask):
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (num_rows * mask[row].sum()),
            "constant": 1 / (num_rows * config.constant_normalizer),
        }[config.aggregation]
        advantage = float(batch.advantages[row])
        ratio = np.exp(float(logprobs[row, token]) - float(batch.behavior_logprobs[row, token]))
        is_clipped = ratio > 1 + config.clip_high if advantage > 0 else ratio < 1 - config.clip_low
        bound = 1 + config.clip_high if advantage > 0 else 1 - config.clip_low
        loss -= weight * advantage * (bound if is_clipped else ratio)
        grad[row, token] -= 0.0 if is_clipped else weight * advantage * ratio
        difference = float(reference[row, token]) - float(logprobs[row, token])
        loss += config.kl_coef * weight * (np.exp(difference) - difference - 1)
        grad[row, token] += config.kl_coef * weight * (1 - np.exp(difference))
    return loss, grad


def _loss(logprobs, batch: Batch, reference, totals: BatchTotals, config: GrpoConfig):
    reference = reference if config.kl_coef > 0 else None
    return grpo_loss(logprobs, jnp.ones_like(logprobs), batch, totals, config, reference_logprobs=reference)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("clip", [(0.2, 0.28), (0.05, 0.6)])
def test_loss_and_gradient_equal_the_oracle(aggregation: str, kl_coef: float, clip: tuple[float, float]) -> None:
    config = GrpoConfig(aggregation=aggregation, kl_coef=kl_coef, clip_low=clip[0], clip_high=clip[1], constant_normalizer=17.0)
    batch, logprobs, reference = _rows()
    totals = batch_totals(batch.loss_mask)
    (loss, metrics), grad = jax.value_and_grad(_loss, has_aux=True)(logprobs, batch, reference, totals, config)
    expected_loss, expected_grad = _oracle(batch, logprobs, reference, config)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(grad, expected_grad, rtol=2e-6, atol=1e-7)
    assert metrics.sums["clip_fraction_low"] > 0
    assert metrics.sums["clip_fraction_high"] > 0


def test_the_oracle_gradient_is_the_slope_of_the_oracle_loss() -> None:
    config = GrpoConfig(aggregation="sequence", kl_coef=0.3)
    batch, logprobs, reference = _rows()
    _, grad = _oracle(batch, logprobs, reference, config)
    for row, token in np.argwhere(batch.loss_mask):
        step = np.zeros(logprobs.shape)
        step[row, token] = 1e-5
        high, _ = _oracle(batch, logprobs.astype(np.float64) + step, reference, config)
        low, _ = _oracle(batch, logprobs.astype(np.float64) - step, reference, config)
        np.testing.assert_allclose((high - low) / 2e-5, grad[row, token], atol=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_losses_of_the_parts_of_a_minibatch_add_up_to_its_loss(aggregation: str) -> None:
    config = GrpoConfig(aggregation=aggregation, kl_coef=0.3)
    batch, logprobs, reference = _rows()
    totals = batch_totals(batch.loss_mask)
    whole, metrics = _loss(logprobs, batch, reference, totals, config)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
        parts.append(_loss(logprobs[rows], part, reference[rows], totals, config))
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-5)
    for name, value in metrics.sums.items():
        np.testing.assert_allclose(sum(part.sums[name] for _, part in parts), value, rtol=1e-5, atol=1e-7, err_msg=name)
    for name, value in metrics.maxima.items():
        assert max(part.maxima[name] for _, part in parts) == value, name


def test_rows_of_padding_change_nothing() -> None:
    config = GrpoConfig(aggregation="sequence")
    batch, logprobs, reference = _rows()
    kept = np.array([0, 1, 2, 3, 5])
    without = jax.tree.map(lambda leaf: leaf[kept], batch)
    loss, _ = _loss(logprobs, batch, reference, batch_totals(batch.loss_mask), config)
    expected, _ = _loss(logprobs[kept], without, reference[kept], batch_totals(without.loss_mask), config)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("shift", [500.0, -500.0])
def test_huge_ratios_give_finite_gradients(shift: float) -> None:
    batch, logprobs, reference = _rows()
    logprobs = np.asarray(batch.behavior_logprobs) + shift
    config = GrpoConfig(kl_coef=0.1)
    (loss, _), grad = jax.value_and_grad(_loss, has_aux=True)(logprobs, batch, reference, batch_totals(batch.loss_mask), config)
    assert np.isfinite(loss)
    assert np.isfinite(grad).all()


def test_metrics_are_what_their_names_say() -> None:
    batch, logprobs, _ = _rows()
    config = GrpoConfig()
    entropy = np.linspace(0, 1, logprobs.size, dtype=np.float32).reshape(logprobs.shape)
    _, metrics = grpo_loss(jnp.asarray(logprobs), jnp.asarray(entropy), batch, batch_totals(batch.loss_mask), config)
    mask = np.asarray(batch.loss_mask)
    gap = (logprobs - np.asarray(batch.behavior_logprobs))[mask]
    ratio = np.exp(gap)
    advantages = np.broadcast_to(np.asarray(batch.advantages)[:, None], mask.shape)[mask]
    expected = {
        "entropy": entropy[mask].mean(),
        "clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).mean(),
        "clip_fraction_high": ((ratio > 1.28) & (advantages > 0)).mean(),
        "behavior_kl": (ratio - 1 - gap).mean(),
        "behavior_gap_mean": np.abs(gap).mean(),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics.sums[name], value, rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(metrics.maxima["behavior_gap_max"], np.abs(gap).max(), rtol=1e-6)
    np.testing.assert_allclose(metrics.maxima["ratio_max"], ratio.max(), rtol=1e-6)


def test_supervised_loss_is_the_mean_over_masked_tokens() -> None:
    batch, logprobs, _ = _rows()
    mask = np.asarray(batch.loss_mask)

    def loss(logprobs):
        return supervised_loss(logprobs, jnp.zeros_like(logprobs), batch, batch_totals(batch.loss_mask))[0]

    value, grad = jax.value_and_grad(loss)(jnp.asarray(logprobs))
    np.testing.assert_allclose(value, -logprobs[mask].mean(), rtol=1e-6)
    np.testing.assert_allclose(grad, np.where(mask, -1 / mask.sum(), 0), rtol=1e-6)
