"""Collects the groups of one learner step: plays every episode at once, replaces what is no use, returns groups in order of id.

The result depends on the prompts, the episodes and nothing else: not on which episode ended first. It refuses to return fewer
groups than were asked for, since the learner's batch has a fixed size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from common.errors import RolloutError
from common.rollout.buffer import GroupBuffer, has_contrast
from common.rollout.tasks import PromptCursor
from common.types import EpisodeEnd, Group, Task, Trajectory


class PlayEpisode(Protocol):
    """`run_episode` with everything but these bound (functools.partial)."""

    async def __call__(self, *, task: Task, trajectory_id: int, group_id: int) -> Trajectory: ...


async def collect_groups(
    prompts: Sequence[tuple[int, Task]],
    *,
    play: PlayEpisode,
    group_size: int,
    cursor: PromptCursor | None = None,
    dynamic_sampling: bool = False,
    max_refills: int = 4,
    buffer: GroupBuffer | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> list[Group]:
    """Play `group_size` episodes of every prompt, with trajectory_id = group_id x group_size + sample_idx; one group per prompt.

    Groups whose episodes keep failing, and with `dynamic_sampling` groups without contrast, are replaced by new prompts from
    `cursor`, for at most `max_refills` rounds; then the missing places are filled with the groups without contrast there are.

    Args:
        cursor: None replaces nothing.
        buffer: keeps its counts over several calls, for metrics.
        on_trajectory: called for every usable trajectory, in order of completion; for progress bars.

    Raises:
        RolloutError: too many groups failed; the text of the last failure is in it.
    """
    buffer = GroupBuffer(group_size=group_size) if buffer is None else buffer
    kept: list[Group] = []
    spare: list[Group] = []
    pending = list(prompts)
    for refill_idx in range(max_refills + 1):
        for group in await _play_groups(pending, play=play, group_size=group_size, buffer=buffer, on_trajectory=on_trajectory):
            (kept if not dynamic_sampling or has_contrast(group) else spare).append(group)
        num_missing = len(prompts) - len(kept)
        if num_missing == 0 or cursor is None or refill_idx == max_refills:
            break
        pending = cursor.take(num_missing)
    num_fillers = len(prompts) - len(kept)
    for group in spare[num_fillers:]:
        buffer.drop_without_contrast(group)
    kept += spare[:num_fillers]
    if len(kept) < len(prompts):
        raise RolloutError(
            f"only {len(kept)} of {len(prompts)} groups could be collected, the episodes of the others kept failing; "
            f"last failure: {buffer.last_error}"
        )
    return sorted(kept, key=lambda group: group.group_id)


async def _play_groups(
    prompts: Sequence[tuple[int, Task]],
    *,
    play: PlayEpisode,
    group_size: int,
    buffer: GroupBuffer,
    on_trajectory: Callable[[Trajectory], None] | None,
) -> list[Group]:
    """The groups that these prompts gave, in order of id; those whose episodes keep failing are not among them."""
    groups: list[Group] = []

    async def play_until_settled(group_id: int, task: Task, trajectory_id: int) -> None:
        while buffer.wants(trajectory_id):
            trajectory = await play(task=task, trajectory_id=trajectory_id, group_id=group_id)
            group = buffer.add(trajectory)
            if group is not None:
                groups.append(group)
            if on_trajectory is not None and trajectory.end is not EpisodeEnd.FAILED:
                on_trajectory(trajectory)

    episodes = [
        asyncio.ensure_future(play_until_settled(group_id, task, group_id * group_size + sample_idx))
        for group_id, task in prompts
        for sample_idx in range(group_size)
    ]
    try:
        await asyncio.gather(*episodes)
    except BaseException:  # what one episode raises concerns them all: end the others before passing it on
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
        raise
    return sorted(groups, key=lambda group: group.group_id)
