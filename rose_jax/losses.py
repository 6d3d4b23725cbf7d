"""Objectives of the learner as pure functions of log-probabilities: clipped policy gradient and supervised likelihood.

Every sum over tokens is divided by numbers that belong to the whole minibatch (`BatchTotals`), never to the rows at hand. So the
loss of a minibatch is the plain sum of the losses of its parts, and neither gradient accumulation nor sharding changes more than
the rounding. Nothing here knows the model, the mesh or the optimizer.

The old policy of the importance ratio is the one that sampled: its log-probabilities arrive with the batch. They are not computed
again by the learner, so the ratio also corrects for the gap between the sampler's arithmetic and the learner's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from common.config import GrpoConfig
from rose_jax.batching import Batch

# A ratio of exp(20) is far outside any clip range. Without the bound exp overflows and the branch of the minimum that is not
# taken still sends 0 x inf = NaN into the gradient.
MAX_LOG_RATIO = 20.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """Denominators of one minibatch: agent tokens, and trajectories that have any. At least 1, so that empty ones give 0."""

    num_tokens: Float32[Array, ""]
    num_trajectories: Float32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossMetrics:
    """Scalars of a part of a minibatch. `sums` of the parts add up to the minibatch's mean; of `maxima` the largest counts."""

    sums: dict[str, Float32[Array, ""]]
    maxima: dict[str, Float32[Array, ""]]


def batch_totals(loss_mask: Bool[Array, "*A B T"]) -> BatchTotals:
    """Count a whole minibatch; leading axes of accumulation are counted too."""
    num_tokens = jnp.sum(loss_mask, dtype=jnp.float32)
    num_trajectories = jnp.sum(jnp.any(loss_mask, axis=-1), dtype=jnp.float32)
    return BatchTotals(num_tokens=jnp.maximum(num_tokens, 1), num_trajectories=jnp.maximum(num_trajectories, 1))


def token_weights(loss_mask: Bool[Array, "B T"], totals: BatchTotals, config: GrpoConfig) -> Float32[Array, "B T"]:
    """The factor of each token's loss in the minibatch's loss; 0 outside the mask. See GrpoConfig.aggregation."""
    mask = loss_mask.astype(jnp.float32)
    if config.aggregation == "token":
        return mask / totals.num_tokens
    if config.aggregation == "sequence":
        row_tokens = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
        return mask / (row_tokens * totals.num_trajectories)
    assert config.aggregation == "constant", config.aggregation
    return mask / (totals.num_trajectories * config.constant_normalizer)


def _k3(log_ratio: Float32[Array, "B T"]) -> Float32[Array, "B T"]:
    """Per-token estimate r - 1 - log r of KL(q || p) with r = p / q and tokens drawn from q: unbiased, never negative
    (J. Schulman, "Approximating KL divergence", 2020)."""
    return jnp.expm1(log_ratio) - log_ratio


def _log_ratio(logprobs: Float[Array, "B T"], other: Float[Array, "B T"], loss_mask: Bool[Array, "B T"]) -> Float32[Array, "B T"]:
    """log(policy / other) at the agent's tokens, bounded; 0 elsewhere, where neither value means anything."""
    difference = jnp.where(loss_mask, logprobs - other, 0.0).astype(jnp.float32)
    return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def grpo_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    batch: Batch,
    totals: BatchTotals,
    config: GrpoConfig,
    *,
    reference_logprobs: Float[Array, "B T"] | None = None,
) -> tuple[Float32[Array, ""], LossMetrics]:
    """Clipped surrogate of GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with separate clip bounds (DAPO, arXiv 2503.14476, eq. 10).

    Args:
        logprobs: of each token under the policy being trained, at the sampling temperature; gradients flow through these alone.
        batch: the rows of `logprobs`; may be a part of a minibatch.
        totals: denominators of the whole minibatch.
        reference_logprobs: of the reference policy; needed if and only if config.kl_coef > 0.
    """
    mask = jnp.asarray(batch.loss_mask)
    advantages = batch.advantages[:, None]
    weights = token_weights(mask, totals, config)
    log_ratio = _log_ratio(logprobs, jnp.asarray(batch.behavior_logprobs), mask)
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    policy_loss = -jnp.sum(weights * jnp.minimum(ratio * advantages, clipped * advantages))
    loss = policy_loss

    def mean(values: Array) -> Float32[Array, ""]:
        return jnp.sum(jnp.where(mask, values, 0.0), dtype=jnp.float32) / totals.num_tokens

    gap = jnp.abs(jnp.where(mask, logprobs - batch.behavior_logprobs, 0.0))
    sums = {
        "policy_loss": policy_loss,
        "entropy": mean(entropy),
        "clip_fraction_low": mean((ratio < 1.0 - config.clip_low) & (advantages < 0)),
        "clip_fraction_high": mean((ratio > 1.0 + config.clip_high) & (advantages > 0)),
        "behavior_kl": mean(_k3(log_ratio)),
        "behavior_gap_mean": mean(gap),
    }
    if config.kl_coef > 0:
        assert reference_logprobs is not None, "kl_coef > 0 needs the reference policy's log-probabilities"
        reference_kl = _k3(_log_ratio(reference_logprobs, logprobs, mask))
        loss = loss + config.kl_coef * jnp.sum(weights * reference_kl)
        sums["reference_kl"] = mean(reference_kl)
    sums["loss"] = loss
    maxima = {"behavior_gap_max": jnp.max(gap), "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0))}
    return loss, LossMetrics(sums=sums, maxima=maxima)


def supervised_loss(
    logprobs: Float[Array, "B T"], entropy: Float[Array, "B T"], batch: Batch, totals: BatchTotals
) -> tuple[Float32[Array, ""], LossMetrics]:
    """Mean negative log-likelihood of the tokens in the mask."""

    def mean(values: Array) -> Float32[Array, ""]:
        return jnp.sum(jnp.where(batch.loss_mask, values, 0.0), dtype=jnp.float32) / totals.num_tokens

    loss = mean(-logprobs)
    return loss, LossMetrics(sums={"loss": loss, "entropy": mean(entropy)}, maxima={})
