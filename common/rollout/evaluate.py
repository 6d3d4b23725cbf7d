"""What a set of trajectories says about a policy: success with standard errors, lengths, rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from common.metrics import TOKENS_PREFIX, Scalar
from common.rollout.buffer import has_contrast
from common.serving.loop import LoopCounters
from common.types import EpisodeEnd, Group, Trajectory


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


def evaluation_metrics(*, sampled: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> dict[str, Scalar]:
    """The row of one evaluation; both sets play the same tasks."""
    rates = {"sampled": success_rate(sampled), "greedy": success_rate(greedy)}
    metrics: dict[str, Scalar] = {"num_tasks": rates["sampled"].num_tasks}
    for mode, rate in rates.items():
        metrics |= {mode: rate.rate, f"{mode}_stderr": rate.stderr}
    return metrics


def tokens_per_replica(counters: Mapping[str, LoopCounters]) -> dict[str, int]:
    """How many tokens each of several replicas sampled, for a row; nothing for one alone."""
    if len(counters) == 1:
        return {}
    return {f"{TOKENS_PREFIX}{name}": each.sampled_tokens for name, each in counters.items()}


def token_shares(rows: Iterable[Mapping[str, Scalar]]) -> dict[str, float]:
    """share_REPLICA: its part of all tokens that rows of `tokens_per_replica` count."""
    totals: dict[str, int] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(TOKENS_PREFIX):
                replica = name.removeprefix(TOKENS_PREFIX)
                totals[replica] = totals.get(replica, 0) + int(value)
    num_tokens = sum(totals.values())
    return {f"share_{replica}": num / num_tokens for replica, num in totals.items()} if num_tokens else {}


def number_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text: 0-7,9. A number that comes twice stands there twice."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def numbers_in(ranges: str) -> list[int]:
    """The inverse of `number_ranges`."""
    spans = [span.partition("-") for span in ranges.split(",") if span]
    return [number for first, dash, last in spans for number in range(int(first), int(last if dash else first) + 1)]


def rollout_metrics(groups: Sequence[Group], counters: LoopCounters, rollout_s: float) -> dict[str, Scalar]:
    """The row of one learner step's rollouts. Rates are over the wall time of the rollout, environments included."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    num_trajectories = len(trajectories)
    num_tokens = [len(trajectory.token_ids) for trajectory in trajectories]
    return {
        "trajectories": number_ranges(trajectory.trajectory_id for trajectory in trajectories),
        "rollout_success": sum(trajectory.success for trajectory in trajectories) / num_trajectories,
        "rollout_reward": sum(trajectory.reward for trajectory in trajectories) / num_trajectories,
        "turns_mean": sum(len(trajectory.turns) for trajectory in trajectories) / num_trajectories,
        "trajectory_tokens_mean": sum(num_tokens) / num_trajectories,
        "trajectory_tokens_max": max(num_tokens),
        "unfinished_share": sum(trajectory.end is not EpisodeEnd.DONE for trajectory in trajectories) / num_trajectories,
        "groups_with_contrast_share": sum(has_contrast(group) for group in groups) / len(groups),
        "rollout_tokens_per_s": counters.sampled_tokens / rollout_s,
        "prefill_tokens": counters.prefill_tokens,
        "sampled_tokens": counters.sampled_tokens,
        "engine_steps": counters.num_steps,
        "engine_device_s": counters.device_s,
    }
