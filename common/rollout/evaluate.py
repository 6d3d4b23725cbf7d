"""Success of a policy on fixed tasks: sampled at temperature 1 and greedy, with standard errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from common.types import Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuccessRate:
    """Share of `num_tasks` solved; `stderr` is the binomial standard error over the tasks."""

    rate: float
    stderr: float
    num_tasks: int

    def __str__(self) -> str:
        return f"{self.rate:.3f} ± {self.stderr:.3f}"


def success_rate(trajectories: Sequence[Trajectory]) -> SuccessRate:
    """A trajectory that failed (its environment broke) counts as not solved."""
    if not trajectories:
        raise ValueError("success of no trajectories is undefined; evaluate at least one task")
    num_tasks = len(trajectories)
    rate = sum(trajectory.success for trajectory in trajectories) / num_tasks
    return SuccessRate(rate=rate, stderr=(rate * (1 - rate) / num_tasks) ** 0.5, num_tasks=num_tasks)
