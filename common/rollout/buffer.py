"""GroupBuffer: puts trajectories together into groups of fixed size. Pure: no clock, no tasks, no order of arrival in its results.

The rule for failures: the learner needs a fixed batch, so a group is complete when it holds `group_size` usable trajectories, and
never smaller. A failed trajectory does not take its place; its caller plays it again under the same id, up to `max_reissues` times.
If it has then still failed, its group is dropped and its caller takes a new prompt instead. Other groups are not touched.

Late results change nothing: a second trajectory with an id that is already in, or one for a group that is complete or dropped, is
only counted.
"""

from __future__ import annotations

import dataclasses

from common.types import EpisodeEnd, Group, Trajectory


@dataclasses.dataclass(kw_only=True)
class BufferCounts:
    """What was thrown away and why, since the buffer was made."""

    failed_trajectories: int = 0
    duplicate_trajectories: int = 0
    dropped_groups_failed: int = 0
    dropped_groups_no_contrast: int = 0


def has_contrast(group: Group) -> bool:
    """Whether rewards differ within the group: if not, every advantage is 0 and it teaches nothing."""
    rewards = [trajectory.reward for trajectory in group.trajectories]
    return min(rewards) != max(rewards)


class GroupBuffer:
    """See the module."""

    def __init__(self, *, group_size: int, max_reissues: int = 2) -> None:
        assert group_size >= 1, group_size
        assert max_reissues >= 0, max_reissues
        self._group_size = group_size
        self._max_reissues = max_reissues
        self._open: dict[int, dict[int, Trajectory]] = {}  # by group id, then trajectory id
        self._num_failures: dict[int, int] = {}  # by trajectory id, of open groups
        self._closed: set[int] = set()
        self.counts = BufferCounts()
        self.last_error: str | None = None

    def add(self, trajectory: Trajectory) -> Group | None:
        """Take in one result; returns the group that it completed, its trajectories in order of id."""
        group_id = trajectory.group_id
        assert trajectory.trajectory_id // self._group_size == group_id, (trajectory.trajectory_id, group_id, self._group_size)
        members = self._open.setdefault(group_id, {}) if group_id not in self._closed else {}
        if group_id in self._closed or trajectory.trajectory_id in members:
            self.counts.duplicate_trajectories += 1
            return None
        if trajectory.end is EpisodeEnd.FAILED:
            self._add_failure(trajectory)
            return None
        members[trajectory.trajectory_id] = trajectory
        if len(members) < self._group_size:
            return None
        self._close(group_id)
        ordered = tuple(members[trajectory_id] for trajectory_id in sorted(members))
        return Group(group_id=group_id, task=trajectory.task, trajectories=ordered)

    def wants(self, trajectory_id: int) -> bool:
        """Whether a result under this id would still count: if so after a failure, play it again."""
        group_id = trajectory_id // self._group_size
        return group_id not in self._closed and trajectory_id not in self._open.get(group_id, {})

    def drop_without_contrast(self, group: Group) -> None:
        """Count a complete group that dynamic sampling replaces."""
        assert group.group_id in self._closed, group.group_id
        self.counts.dropped_groups_no_contrast += 1

    def _add_failure(self, trajectory: Trajectory) -> None:
        self.counts.failed_trajectories += 1
        self.last_error = trajectory.error
        num_failures = self._num_failures.get(trajectory.trajectory_id, 0) + 1
        self._num_failures[trajectory.trajectory_id] = num_failures
        if num_failures > self._max_reissues:
            self.counts.dropped_groups_failed += 1
            self._close(trajectory.group_id)

    def _close(self, group_id: int) -> None:
        self._closed.add(group_id)
        self._open.pop(group_id, None)
        for sample_idx in range(self._group_size):
            self._num_failures.pop(group_id * self._group_size + sample_idx, None)
