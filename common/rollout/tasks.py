"""PromptCursor: which tasks are trained on, in which order.

An endless deterministic sequence over one split: every epoch is a fresh permutation drawn from (seed, epoch), so each task comes
once an epoch. The whole state is one integer, the number of prompts taken, which is also the next group's id: a run that restores
it goes on with exactly the prompt that would have come next. It does not know what became of a prompt; whoever saves the integer
saves it together with the parameters that were trained on the prompts before it.
"""

from __future__ import annotations

import numpy as np

from common.rollout.environment import TaskSuite
from common.types import Split, Task


class PromptCursor:
    """See the module."""

    def __init__(self, suite: TaskSuite, *, seed: int, split: Split = Split.TRAIN, num_taken: int = 0) -> None:
        """
        Raises:
            ValueError: the split has no tasks, or num_taken is negative.
        """
        if suite.num_tasks(split) < 1:
            raise ValueError(f"{type(suite).__name__} has no tasks in split {split.value}; give it at least one")
        if num_taken < 0:
            raise ValueError(f"num_taken={num_taken} must not be negative")
        self._suite = suite
        self._split = split
        self._seed = seed
        self._num_taken = num_taken
        self._epoch: int | None = None
        self._order = np.empty(0, dtype=np.int64)

    @property
    def num_taken(self) -> int:
        """Prompts handed out since the run began; the group id of the next one."""
        return self._num_taken

    def take(self, num_prompts: int) -> list[tuple[int, Task]]:
        """The next prompts as (group_id, task)."""
        return [self._take_one() for _ in range(num_prompts)]

    def _take_one(self) -> tuple[int, Task]:
        group_id = self._num_taken
        epoch, idx = divmod(group_id, self._suite.num_tasks(self._split))
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._suite.num_tasks(self._split))
            self._epoch = epoch
        self._num_taken += 1
        return group_id, self._suite.task(self._split, int(self._order[idx]))
