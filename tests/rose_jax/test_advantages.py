"""Advantages compare siblings only, and say nothing where there is nothing to compare."""

import numpy as np
import pytest

from common.types import EpisodeEnd, Group
from rose_jax.advantages import group_advantages, score_groups
from tests.rose_jax.training_data import TASK, trajectory


def _group(*rewards: float, failed: tuple[int, ...] = ()) -> Group:
    ends = [EpisodeEnd.FAILED if idx in failed else EpisodeEnd.DONE for idx in range(len(rewards))]
    trajectories = tuple(
        trajectory(20, reward=reward, seed=idx, end=end) for idx, (reward, end) in enumerate(zip(rewards, ends, strict=True))
    )
    return Group(group_id=0, task=TASK, trajectories=trajectories)


def test_advantages_are_centered_and_have_unit_deviation() -> None:
    advantages = group_advantages(np.array([0.0, 1.0, 1.0, 0.0, 0.5]), normalize_std=True)
    assert advantages.dtype == np.float32
    np.testing.assert_allclose(advantages.mean(), 0, atol=1e-7)
    np.testing.assert_allclose(advantages.std(), 1, rtol=1e-5)


def test_without_normalisation_advantages_are_reward_minus_mean() -> None:
    advantages = group_advantages(np.array([0.0, 1.0, 1.0, 0.0]), normalize_std=False)
    np.testing.assert_array_equal(advantages, [-0.5, 0.5, 0.5, -0.5])


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1e6 / 3])
def test_equal_rewards_give_exactly_zero(reward: float, normalize_std: bool) -> None:
    np.testing.assert_array_equal(group_advantages(np.full(7, reward), normalize_std=normalize_std), np.zeros(7))


def test_rewards_that_differ_by_rounding_alone_are_not_blown_up() -> None:
    advantages = group_advantages(np.array([0.3, 0.1 + 0.2]), normalize_std=True)
    assert np.abs(advantages).max() < 1e-6


def test_a_reward_that_is_not_finite_is_refused_by_value() -> None:
    with pytest.raises(ValueError, match="nan"):
        group_advantages(np.array([0.0, np.nan]), normalize_std=True)


def test_failed_trajectories_are_left_out_and_survivors_scored_against_each_other() -> None:
    scored = score_groups([_group(1.0, 0.0, 1.0, 0.0, failed=(0,))], normalize_std=False)
    np.testing.assert_allclose([item.advantage for item in scored], np.array([0, 1, 0]) - 1 / 3, rtol=1e-6)
    assert [item.trajectory.trajectory_id for item in scored] == [1, 2, 3]


def test_a_lone_survivor_is_not_scored() -> None:
    assert score_groups([_group(1.0, 0.0, failed=(0,))], normalize_std=True) == []
