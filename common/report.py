"""The report of a run: report.md with curves.png, one trajectory turn by turn, and where the time went.

Reads only what the run logged (a RunLog), so that a report can be made again at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common.metrics import TIME_METRICS, RunLog
from common.types import Trajectory

EVAL_MODES = ("sampled", "greedy")
SMOOTHING = 0.2
"""Weight of the newest value in the exponentially weighted line drawn over noisy per-version values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Success on the held-out tasks at one version, as logged."""

    version: int
    sampled: float
    sampled_stderr: float
    greedy: float
    greedy_stderr: float
    num_tasks: int


def evaluations(log: RunLog) -> list[Evaluation]:
    """All logged evaluations in order of version."""
    rows = [row for row in log.rows if row["phase"] == "eval"]
    return [
        Evaluation(
            version=int(row["step"]),
            sampled=float(row["sampled"]),
            sampled_stderr=float(row["sampled_stderr"]),
            greedy=float(row["greedy"]),
            greedy_stderr=float(row["greedy_stderr"]),
            num_tasks=int(row["num_tasks"]),
        )
        for row in sorted(rows, key=lambda row: int(row["step"]))
    ]


def seconds_by_part(log: RunLog) -> dict[str, float]:
    """Wall seconds of each part of the run, resumed stretches included once."""
    totals: dict[str, float] = {}
    for name in TIME_METRICS:
        seconds = sum(float(row[name]) for row in log.rows if name in row)
        if seconds > 0:
            totals[name.removesuffix("_s")] = seconds
    return totals


def summary_lines(log: RunLog) -> list[str]:
    """What the terminal shows at the end."""
    evals, parts = evaluations(log), seconds_by_part(log)
    lines = []
    if evals:
        first, last = evals[0], evals[-1]
        lines.append(f"Success on {last.num_tasks} held-out tasks      before RL         after {last.version} versions")
        for mode in EVAL_MODES:
            values = [f"{getattr(e, mode):.3f} ± {getattr(e, mode + '_stderr'):.3f}" for e in (first, last)]
            lines.append(f"  {mode:<32}{values[0]:<18}{values[1]}")
    total_s = sum(parts.values())
    if total_s > 0:
        shares = ", ".join(f"{name} {seconds:.0f} s ({seconds / total_s:.0%})" for name, seconds in parts.items())
        lines.append(f"Time {total_s / 60:.1f} min: {shares}")
    return lines


def trajectory_markdown(trajectory: Trajectory) -> str:
    """One episode turn by turn, with the log-probability of each action and the weight version it was sampled under."""
    lines = [
        f"Task `{trajectory.task.task_id}`: reward {trajectory.reward:g}, {'solved' if trajectory.success else 'not solved'}, "
        f"ended by {trajectory.end.value} after {len(trajectory.turns)} turns and {len(trajectory.token_ids)} tokens.",
        "",
        "| turn | observation | action | log-probability | version | reward |",
        "|---|---|---|---|---|---|",
    ]
    for turn_idx, turn in enumerate(trajectory.turns):
        span = slice(turn.start_token_idx, turn.end_token_idx)
        logprob = float(trajectory.behavior_logprobs[span].sum())
        versions = sorted({int(version) for version in trajectory.weight_versions[span]})
        observation, action = (text.replace("|", "\\|").replace("\n", " ") for text in (turn.observation, turn.action))
        lines.append(
            f"| {turn_idx} | {observation} | **{action}** | {logprob:.2f} | {', '.join(map(str, versions))} | {turn.reward:g} |"
        )
    return "\n".join(lines)


def _smooth(values: Sequence[float]) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else (1 - SMOOTHING) * smoothed[-1] + SMOOTHING * value)
    return smoothed


def plot_curves(log: RunLog, path: Path) -> None:
    """Warm-up loss, success, policy diagnostics and where the time went, as one picture."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    warmup, success, policy, time_axis = axes.flat
    for name in ("loss", "validation_loss"):
        warmup.plot(*log.series("warmup", name), label=name.replace("_", " "), marker="." if name != "loss" else None)
    warmup.set(title="Warm-up on demonstrations", xlabel="update", ylabel="negative log-likelihood (nats/token)")
    warmup.legend()
    versions, rollout_success = log.series("train", "rollout_success")
    success.plot(versions, rollout_success, alpha=0.3, color="C0")
    success.plot(versions, _smooth(rollout_success), color="C0", label="training rollouts (smoothed)")
    evals = evaluations(log)
    for mode, color in zip(EVAL_MODES, ("C1", "C2"), strict=True):
        values, errors = [getattr(e, mode) for e in evals], [getattr(e, f"{mode}_stderr") for e in evals]
        success.errorbar([e.version for e in evals], values, yerr=errors, fmt="o-", color=color, label=f"held-out, {mode}")
    success.set(title="Success", xlabel="weight version", ylim=(0, 1))
    success.legend(loc="lower right")
    for name in ("entropy", "clip_fraction_high", "clip_fraction_low", "bf16_unchanged_share"):
        steps, values = log.series("train", name)
        if values:
            policy.plot(steps, values, label=name.replace("_", " "))
    policy.set(title="Policy", xlabel="weight version")
    if policy.lines:
        policy.legend()
    parts = seconds_by_part(log)
    time_axis.barh(list(parts), list(parts.values()))
    time_axis.invert_yaxis()
    time_axis.set(title="Where the time went", xlabel="wall seconds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(log: RunLog, workdir: Path, trajectories: Sequence[Trajectory]) -> Path:
    """Write report.md and curves.png into the workdir and return the former.

    Args:
        trajectories: examples to show turn by turn, for instance one solved and one not.
    """
    plot_curves(log, workdir / "curves.png")
    parts = ["# Report", "", "```", *summary_lines(log), "```", "", "![curves](curves.png)", ""]
    parts += [
        "The resolved configuration is in `config.json`, every figure in `metrics.jsonl`, TensorBoard files in `tensorboard/`.",
        "",
    ]
    for number, trajectory in enumerate(trajectories, start=1):
        parts += [f"## Trajectory {number}", "", trajectory_markdown(trajectory), ""]
    path = workdir / "report.md"
    path.write_text("\n".join(parts))
    return path
