"""Trajectories made by hand, for tests of what is computed from them."""

import numpy as np

from common.types import EpisodeEnd, Group, Split, Task, Trajectory, Turn


def make_trajectory(
    *,
    success: bool,
    trajectory_id: int = 0,
    num_turns: int = 2,
    end: EpisodeEnd = EpisodeEnd.DONE,
    observation: str = "a room",
    action: str = "look",
) -> Trajectory:
    """Each turn is three tokens given and two the agent's own, sampled with probability 1/2 each under version 7."""
    turn_mask = np.array([False, False, False, True, True])
    loss_mask = np.tile(turn_mask, num_turns)
    reward = float(success)
    turns = tuple(
        Turn(
            observation=observation,
            action=action,
            reward=reward if turn_idx == num_turns - 1 else 0.0,
            start_token_idx=5 * turn_idx + 3,
            end_token_idx=5 * turn_idx + 5,
        )
        for turn_idx in range(num_turns)
    )
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=trajectory_id // 2,
        task=Task(task_id=f"test/held_out/{trajectory_id}", split=Split.HELD_OUT, spec=""),
        token_ids=np.arange(5 * num_turns, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=np.where(loss_mask, np.log(0.5), 0.0).astype(np.float32),
        weight_versions=np.where(loss_mask, 7, 0).astype(np.int32),
        reward=reward,
        success=success,
        end=end,
        turns=turns,
    )


def make_group(*successes: bool, group_id: int = 0, num_turns: int = 2) -> Group:
    trajectories = tuple(
        make_trajectory(success=success, trajectory_id=len(successes) * group_id + idx, num_turns=num_turns)
        for idx, success in enumerate(successes)
    )
    return Group(group_id=group_id, task=trajectories[0].task, trajectories=trajectories)
