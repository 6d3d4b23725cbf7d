"""Group-relative advantages: how much better a trajectory did than its siblings on the same prompt.

Works on finished host records and plain numpy. Trajectories that FAILED carry no usable data and are left out; their siblings are
scored against each other. A group without at least two usable trajectories has nothing to compare and gives nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Float32

from common.types import EpisodeEnd, Group, Trajectory

# Keeps a group whose rewards differ by rounding alone from being blown up to full-size advantages.
MIN_STD = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScoredTrajectory:
    """A trajectory and its advantage, which holds for each of its agent tokens."""

    trajectory: Trajectory
    advantage: float


def group_advantages(rewards: Float[np.ndarray, "G"], *, normalize_std: bool) -> Float32[np.ndarray, "G"]:
    """Rewards minus their mean, divided by their (population) standard deviation if `normalize_std`.

    DeepSeekMath (arXiv 2402.03300, section 4.1.2); without the division Dr. GRPO (arXiv 2503.20783). Equal rewards give exactly 0.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards {rewards.tolist()} of one group are not all finite; the environment must return finite rewards")
    if rewards.size == 0 or rewards.min() == rewards.max():  # a rounded mean would leave tiny advantages behind
        return np.zeros(rewards.shape, dtype=np.float32)
    centered = rewards - rewards.mean()
    if normalize_std:
        centered = centered / (rewards.std() + MIN_STD)
    return centered.astype(np.float32)


def usable_trajectories(group: Group) -> tuple[Trajectory, ...]:
    """The trajectories of a group that did not fail, or none when fewer than two are left."""
    usable = tuple(trajectory for trajectory in group.trajectories if trajectory.end is not EpisodeEnd.FAILED)
    return usable if len(usable) >= 2 else ()


def score_groups(groups: Iterable[Group], *, normalize_std: bool) -> list[ScoredTrajectory]:
    """The usable trajectories of all groups with their advantages, in order."""
    scored: list[ScoredTrajectory] = []
    for group in groups:
        trajectories = usable_trajectories(group)
        rewards = np.array([trajectory.reward for trajectory in trajectories], dtype=np.float64)
        advantages = group_advantages(rewards, normalize_std=normalize_std)
        scored.extend(
            ScoredTrajectory(trajectory=trajectory, advantage=float(advantage))
            for trajectory, advantage in zip(trajectories, advantages, strict=True)
        )
    return scored
