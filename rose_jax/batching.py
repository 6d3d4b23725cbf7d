"""From trajectories to arrays: padding, minibatches, micro-batches. Everything here is numpy on the host and deterministic.

Shapes are few, so that the jitted update compiles few times: T is rounded up to a bucket, and each minibatch has the same number
of rows whatever came back. A missing trajectory is a row of zero weight (nothing in its mask): losses divide by what is in the
mask, so such rows change nothing. Buckets depend on the batch alone, never on earlier ones: a resumed run sees the same shapes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32

from common.types import Trajectory
from rose_jax.advantages import ScoredTrajectory

HostOrDeviceArray = np.ndarray | jax.Array

MIN_BUCKET_TOKENS = 64
PAD_TOKEN_ID = 0  # any valid id would do: causal attention never looks right, and the mask is False there


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Padded trajectories. Micro-batched ones have a leading axis A over which one update is summed.

    `advantages` holds for each of a row's agent tokens. In demonstrations `behavior_logprobs` and `advantages` are 0 and unused.
    """

    token_ids: Int32[HostOrDeviceArray, "*A B T"]
    loss_mask: Bool[HostOrDeviceArray, "*A B T"]
    behavior_logprobs: Float32[HostOrDeviceArray, "*A B T"]
    advantages: Float32[HostOrDeviceArray, "*A B"]

    @property
    def num_rows(self) -> int:
        return math.prod(self.token_ids.shape[:-1])


def bucket_tokens(num_tokens: int) -> int:
    """`num_tokens` rounded up to a length that is compiled for: multiples of 64 up to 512, then eight steps per doubling."""
    step = max(MIN_BUCKET_TOKENS, 2 ** max(0, (num_tokens - 1).bit_length() - 4))
    return max(1, -(-num_tokens // step)) * step


def _rows(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> Batch:
    num_tokens = bucket_tokens(max((len(trajectory.token_ids) for trajectory in trajectories), default=1))
    shape = (len(trajectories), num_tokens)
    token_ids = np.full(shape, PAD_TOKEN_ID, dtype=np.int32)
    loss_mask = np.zeros(shape, dtype=np.bool_)
    behavior_logprobs = np.zeros(shape, dtype=np.float32)
    for row_idx, trajectory in enumerate(trajectories):
        length = len(trajectory.token_ids)
        assert not trajectory.loss_mask[:1].any(), "the first token has no context and cannot carry loss"
        token_ids[row_idx, :length] = trajectory.token_ids
        loss_mask[row_idx, :length] = trajectory.loss_mask
        behavior_logprobs[row_idx, :length] = np.where(trajectory.loss_mask, trajectory.behavior_logprobs, 0)
    return Batch(
        token_ids=token_ids,
        loss_mask=loss_mask,
        behavior_logprobs=behavior_logprobs,
        advantages=np.asarray(advantages, dtype=np.float32).reshape(len(trajectories)),
    )


def rl_batch(scored: Sequence[ScoredTrajectory]) -> Batch:
    """Rows for reinforcement learning; trajectories without a single agent token are left out, there is nothing to learn in them.

    Raises:
        ValueError: no row is left.
    """
    kept = [item for item in scored if item.trajectory.loss_mask.any()]
    if not kept:
        raise ValueError(
            f"none of the {len(scored)} scored trajectories has an agent token; all groups of this step failed or are empty"
        )
    return _rows([item.trajectory for item in kept], [item.advantage for item in kept])


def demonstration_batch(demonstrations: Sequence[Trajectory]) -> Batch:
    """Rows for supervised learning on the tokens in each trajectory's mask.

    Raises:
        ValueError: there are none.
    """
    kept = [trajectory for trajectory in demonstrations if trajectory.loss_mask.any()]
    if not kept:
        raise ValueError(f"none of the {len(demonstrations)} demonstrations has a token that carries loss")
    return _rows(kept, [0.0] * len(kept))


def pad_rows(batch: Batch, num_rows: int) -> Batch:
    """Append rows of zero weight until there are `num_rows`."""
    missing = num_rows - batch.token_ids.shape[0]
    assert missing >= 0, (num_rows, batch.token_ids.shape)
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)]), batch)


def micro_batches(batch: Batch, *, accumulation_steps: int, row_multiple: int = 1) -> Batch:
    """[B, ...] to [A, B / A, ...], each part padded to a multiple of `row_multiple` rows (the devices that share them)."""
    part = accumulation_steps * row_multiple
    padded = pad_rows(batch, -(-batch.token_ids.shape[0] // part) * part)
    return jax.tree.map(lambda leaf: leaf.reshape(accumulation_steps, -1, *leaf.shape[1:]), padded)


def minibatches(batch: Batch, *, num_minibatches: int, num_rows: int, seed: int, version: int, epoch_idx: int) -> list[Batch]:
    """Shuffle the rows and deal them into minibatches of num_rows / num_minibatches rows each.

    The order is a function of (seed, version, epoch_idx) alone. When fewer than `num_rows` came, each minibatch gets its share of
    them (sizes differ by at most one) and is filled up with rows of zero weight; a minibatch that got none is left out, since an
    update on nothing would still move the weights by their momentum.

    Raises:
        ValueError: more rows than `num_rows`.
    """
    num_given = batch.token_ids.shape[0]
    if num_given > num_rows:
        raise ValueError(
            f"{num_given} trajectories are more than the {num_rows} a step is configured for; "
            "raise grpo.prompts_per_step or hand in fewer groups"
        )
    assert num_rows % num_minibatches == 0, (num_rows, num_minibatches)
    order = np.random.default_rng([seed, version, epoch_idx]).permutation(num_given)
    parts = [order[start::num_minibatches] for start in range(num_minibatches)]
    return [
        pad_rows(jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch), num_rows // num_minibatches)
        for rows in parts
        if rows.size
    ]
