"""Groups are complete or dropped, never smaller; late results change nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.rollout.buffer import GroupBuffer, has_contrast
from common.types import EpisodeEnd, Group, Trajectory
from tests.common.rollout.fakes import TASK


def trajectory_of(trajectory_id: int, *, group_size: int = 2, failed: bool = False, reward: float = 0.0) -> Trajectory:
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=trajectory_id // group_size,
        task=TASK,
        token_ids=np.zeros(3, np.int32),
        loss_mask=np.zeros(3, np.bool_),
        behavior_logprobs=np.zeros(3, np.float32),
        weight_versions=np.zeros(3, np.int32),
        reward=reward,
        success=False,
        end=EpisodeEnd.FAILED if failed else EpisodeEnd.DONE,
        turns=(),
        error="the simulator crashed" if failed else None,
    )


@given(order=st.permutations(range(12)))
def test_groups_do_not_depend_on_the_order_of_arrival(order: list[int]) -> None:
    buffer = GroupBuffer(group_size=4)
    groups = [group for trajectory_id in order if (group := buffer.add(trajectory_of(trajectory_id, group_size=4))) is not None]
    members = {group.group_id: [trajectory.trajectory_id for trajectory in group.trajectories] for group in groups}
    assert members == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}


def test_late_duplicates_change_nothing() -> None:
    buffer = GroupBuffer(group_size=2)
    assert buffer.add(trajectory_of(0, reward=1.0)) is None
    assert buffer.add(trajectory_of(0, reward=5.0)) is None
    assert buffer.add(trajectory_of(0, failed=True)) is None
    group = buffer.add(trajectory_of(1))
    assert group is not None
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 0.0]
    assert buffer.add(trajectory_of(0)) is None
    assert buffer.add(trajectory_of(1)) is None
    assert buffer.counts.duplicate_trajectories == 4
    assert buffer.counts.failed_trajectories == 0


def test_a_failed_trajectory_is_wanted_again_and_its_group_still_completes() -> None:
    buffer = GroupBuffer(group_size=2, max_reissues=1)
    buffer.add(trajectory_of(1))
    assert buffer.add(trajectory_of(0, failed=True)) is None
    assert buffer.wants(0)
    assert not buffer.wants(1)
    assert buffer.add(trajectory_of(0)) is not None
    assert not buffer.wants(0)
    assert buffer.counts.dropped_groups_failed == 0


def test_a_group_whose_trajectory_keeps_failing_is_dropped_alone() -> None:
    buffer = GroupBuffer(group_size=2, max_reissues=1)
    for _ in range(2):
        buffer.add(trajectory_of(0, failed=True))
    assert not buffer.wants(0)
    assert not buffer.wants(1)
    assert buffer.add(trajectory_of(1)) is None
    assert (buffer.counts.dropped_groups_failed, buffer.counts.failed_trajectories) == (1, 2)
    assert buffer.counts.duplicate_trajectories == 1
    assert buffer.last_error == "the simulator crashed"
    buffer.add(trajectory_of(2))
    assert buffer.add(trajectory_of(3)) is not None


@pytest.mark.parametrize(("rewards", "contrast"), [((0.0, 0.0), False), ((1.0, 1.0), False), ((0.0, 1.0), True)])
def test_a_group_has_contrast_if_its_rewards_differ(rewards: tuple[float, float], contrast: bool) -> None:
    members = tuple(trajectory_of(idx, reward=reward) for idx, reward in enumerate(rewards))
    assert has_contrast(Group(group_id=0, task=TASK, trajectories=members)) is contrast
