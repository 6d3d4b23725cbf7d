"""What is said about a set of trajectories is what counting by hand gives."""

from __future__ import annotations

import math

import pytest

from common.rollout.evaluate import evaluation_metrics, rollout_metrics, success_rate
from common.serving.loop import LoopCounters
from common.types import EpisodeEnd
from tests.common.rollout.trajectories import make_group, make_trajectory


def test_success_is_the_share_of_tasks_with_its_binomial_error() -> None:
    rate = success_rate([make_trajectory(success=idx < 3) for idx in range(12)])
    assert (rate.rate, rate.num_tasks) == (0.25, 12)
    assert rate.stderr == pytest.approx(math.sqrt(0.25 * 0.75 / 12))
    assert str(rate) == "0.250 ± 0.125"


def test_an_episode_that_failed_counts_as_not_solved() -> None:
    solved, broken = make_trajectory(success=True), make_trajectory(success=False, end=EpisodeEnd.FAILED)
    assert success_rate([solved, broken]).rate == 0.5


def test_success_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        success_rate([])


def test_an_evaluation_row_holds_both_modes() -> None:
    row = evaluation_metrics(
        sampled=[make_trajectory(success=success) for success in (True, False)],
        greedy=[make_trajectory(success=True) for _ in range(2)],
    )
    assert row == {
        "num_tasks": 2,
        "sampled": 0.5,
        "sampled_stderr": pytest.approx(math.sqrt(0.125)),
        "greedy": 1.0,
        "greedy_stderr": 0.0,
    }


def test_a_rollout_row_counts_trajectories_tokens_and_groups_that_teach() -> None:
    groups = [make_group(True, False), make_group(True, True, group_id=1, num_turns=4)]
    counters = LoopCounters(num_steps=9, prefill_tokens=100, sampled_tokens=24, device_s=0.5)
    row = rollout_metrics(groups, counters, rollout_s=2.0)
    assert row["rollout_success"] == row["rollout_reward"] == 0.75
    assert row["turns_mean"] == 3.0
    assert (row["trajectory_tokens_mean"], row["trajectory_tokens_max"]) == (15.0, 20)
    assert row["groups_with_contrast_share"] == 0.5
    assert row["unfinished_share"] == 0.0
    assert row["rollout_tokens_per_s"] == 12.0
    assert (row["engine_steps"], row["prefill_tokens"], row["sampled_tokens"], row["engine_device_s"]) == (9, 100, 24, 0.5)
