"""Batches keep every token in its place, have few shapes, and are dealt the same way every time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_jax.advantages import ScoredTrajectory, score_groups
from rose_jax.batching import bucket_tokens, demonstration_batch, micro_batches, minibatches, pad_rows, rl_batch
from tests.rose_jax.training_data import groups, trajectory


def _batch(num_groups: int = 4, group_size: int = 4):
    return rl_batch(score_groups(groups(num_groups, group_size), normalize_std=True))


def _row_keys(batch) -> list[bytes]:
    """Identify the rows that carry anything."""
    return [ids.tobytes() for ids, mask in zip(batch.token_ids, batch.loss_mask, strict=True) if mask.any()]


@given(st.integers(1, 200_000))
@settings(max_examples=300, deadline=None)
def test_a_bucket_holds_its_length_and_wastes_little(num_tokens: int) -> None:
    bucket = bucket_tokens(num_tokens)
    assert bucket >= num_tokens
    assert bucket % 64 == 0
    assert bucket - num_tokens < max(64, num_tokens / 8)
    assert bucket_tokens(bucket) == bucket


def test_buckets_are_few() -> None:
    assert len({bucket_tokens(num_tokens) for num_tokens in range(1, 32_769)}) == 8 * 7  # 64..512 and six doublings


def test_rows_keep_tokens_masks_and_advantages_in_place() -> None:
    items = [
        ScoredTrajectory(trajectory=trajectory(30, seed=1), advantage=0.5),
        ScoredTrajectory(trajectory=trajectory(70, seed=2), advantage=-1.5),
    ]
    batch = rl_batch(items)
    assert batch.token_ids.shape == (2, 128)
    for row, item in enumerate(items):
        length = len(item.trajectory.token_ids)
        np.testing.assert_array_equal(batch.token_ids[row, :length], item.trajectory.token_ids)
        np.testing.assert_array_equal(batch.loss_mask[row, :length], item.trajectory.loss_mask)
        np.testing.assert_array_equal(batch.behavior_logprobs[row, :length], item.trajectory.behavior_logprobs)
        assert not batch.loss_mask[row, length:].any()
    np.testing.assert_array_equal(batch.advantages, np.float32([0.5, -1.5]))


def test_trajectories_without_an_agent_token_get_no_row() -> None:
    silent = ScoredTrajectory(trajectory=trajectory(300, has_loss=False), advantage=1.0)
    batch = rl_batch([silent, ScoredTrajectory(trajectory=trajectory(20), advantage=1.0)])
    assert batch.token_ids.shape == (1, 64)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 1 scored"):
        rl_batch([ScoredTrajectory(trajectory=trajectory(20, has_loss=False), advantage=0.0)])
    with pytest.raises(ValueError, match="none of the 0 demonstrations"):
        demonstration_batch([])


def test_minibatches_hold_each_trajectory_exactly_once() -> None:
    batch = _batch()
    parts = minibatches(batch, num_minibatches=4, num_rows=16, seed=0, version=3, epoch_idx=0)
    assert [part.token_ids.shape for part in parts] == [(4, 64)] * 4
    assert sorted(key for part in parts for key in _row_keys(part)) == sorted(_row_keys(batch))


def test_the_order_depends_on_seed_version_and_epoch_alone() -> None:
    def order(**changes: int) -> list[bytes]:
        where = {"seed": 0, "version": 0, "epoch_idx": 0} | changes
        parts = minibatches(_batch(), num_minibatches=2, num_rows=16, **where)
        return [key for part in parts for key in _row_keys(part)]

    assert order() == order()
    assert len({tuple(order(**change)) for change in ({}, {"seed": 1}, {"version": 1}, {"epoch_idx": 1})}) == 4


@pytest.mark.parametrize("num_given", [3, 5, 15])
def test_missing_trajectories_become_rows_of_zero_weight_spread_evenly(num_given: int) -> None:
    scored = score_groups(groups(), normalize_std=True)[:num_given]
    parts = minibatches(rl_batch(scored), num_minibatches=2, num_rows=16, seed=0, version=0, epoch_idx=0)
    assert [part.token_ids.shape[0] for part in parts] == [8, 8]
    num_real = [int(part.loss_mask.any(axis=1).sum()) for part in parts]
    assert sum(num_real) == num_given
    assert max(num_real) - min(num_real) <= 1


def test_a_minibatch_that_got_nothing_is_left_out() -> None:
    scored = score_groups(groups(), normalize_std=True)[:2]
    assert len(minibatches(rl_batch(scored), num_minibatches=4, num_rows=16, seed=0, version=0, epoch_idx=0)) == 2


def test_too_many_trajectories_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"16 trajectories are more than the 8"):
        minibatches(_batch(), num_minibatches=2, num_rows=8, seed=0, version=0, epoch_idx=0)


def test_micro_batches_cut_rows_and_fill_up_to_the_devices() -> None:
    batch = pad_rows(_batch(), 18)
    parts = micro_batches(batch, accumulation_steps=2, row_multiple=4)
    assert parts.token_ids.shape == (2, 12, 64)
    assert parts.advantages.shape == (2, 12)
    np.testing.assert_array_equal(parts.token_ids.reshape(24, 64)[:18], batch.token_ids)
    assert not parts.loss_mask.reshape(24, 64)[18:].any()
