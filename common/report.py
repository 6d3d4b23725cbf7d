"""The report of a run: report.md with curves.png, a solved and a failed trajectory turn by turn, and where the time went.

Reads only what the run logged (a RunLog) and the trajectories it is given, so that a report can be made again at any time. A run
that was cut short, or had no warm-up, has a report too: what is missing is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from common.metrics import TIME_METRICS, TOKENS_PREFIX, RunLog
from common.types import Trajectory

EVAL_MODES = {"sampled": "C0", "greedy": "C1"}
"""How held-out tasks are played, and the colour each is drawn in."""
SMOOTHING = 0.2
"""Weight of the newest value in the exponentially weighted line drawn over noisy per-version values."""


WHOLE_NUMBERS = ("weight version", "update")
FEW_POINTS = 30
"""Lines with fewer points show each of them."""
FILES = {
    "config.json": "the resolved configuration",
    "metrics.jsonl": "every figure, one row per warm-up update, version, evaluation and checkpoint",
    "tensorboard/": "the same for TensorBoard",
    "checkpoints/": "what the same command goes on from",
    "model/": "the trained model in Hugging Face form",
    "logs/": "what replica processes wrote, and what happened to them (runs with a fleet)",
    "coserving.json, traffic/": "what online clients saw and what was borrowed, request by request (runs with online traffic)",
}


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


def headline(log: RunLog) -> str:
    """The result in one sentence."""
    evals = evaluations(log)
    if not evals:
        return "Not evaluated yet"
    first, last = evals[0], evals[-1]
    if last.version == first.version:
        return f"Sampled success {last.sampled:.2f} on {last.num_tasks} held-out tasks at version {last.version}"
    return (
        f"Sampled success {first.sampled:.2f} → {last.sampled:.2f} on {last.num_tasks} held-out tasks in "
        f"{last.version - first.version} versions"
    )


def summary_lines(log: RunLog) -> list[str]:
    """What the terminal shows at the end."""
    evals, parts = evaluations(log), seconds_by_part(log)
    lines = []
    if evals:
        first, last = evals[0], evals[-1]
        title = f"Success on {last.num_tasks} held-out tasks"
        lines.append(f"{title:<34}{'before RL':<18}after {last.version} versions")
        for mode in EVAL_MODES:
            values = [f"{getattr(e, mode):.3f} ± {getattr(e, mode + '_stderr'):.3f}" for e in (first, last)]
            lines.append(f"  {mode:<32}{values[0]:<18}{values[1]}")
    total_s = sum(parts.values())
    if total_s > 0:
        shares = ", ".join(f"{name} {seconds:.0f} s ({seconds / total_s:.0%})" for name, seconds in parts.items())
        lines.append(f"Time {total_s / 60:.1f} min: {shares}")
    return lines


def _success_table(log: RunLog) -> list[str]:
    rows = [
        f"| {e.version} | {e.sampled:.3f} ± {e.sampled_stderr:.3f} | {e.greedy:.3f} ± {e.greedy_stderr:.3f} | {e.num_tasks} |"
        for e in evaluations(log)
    ]
    return ["| version | sampled | greedy | held-out tasks |", "|--:|--:|--:|--:|", *rows, ""] if rows else []


def _time_table(log: RunLog) -> list[str]:
    parts = seconds_by_part(log)
    total_s = sum(parts.values())
    rows = [f"| {name} | {seconds:.1f} | {seconds / total_s:.0%} |" for name, seconds in parts.items()]
    return ["| part | seconds | share |", "|---|--:|--:|", *rows, f"| together | {total_s:.1f} | |", ""] if rows else []


def _replica_table(log: RunLog) -> list[str]:
    """How many tokens each of several replicas sampled for training; nothing of a run with one."""
    tokens: dict[str, float] = {}
    for row in log.rows:
        for name, value in row.items():
            if name.startswith(TOKENS_PREFIX):
                tokens[name.removeprefix(TOKENS_PREFIX)] = tokens.get(name.removeprefix(TOKENS_PREFIX), 0) + float(value)
    total = sum(tokens.values())
    if not total:
        return []
    rows = [f"| {name} | {num:.0f} | {num / total:.0%} |" for name, num in tokens.items()]
    return ["## Who sampled", "", "| replica | tokens | share |", "|---|--:|--:|", *rows, ""]


def trajectory_markdown(trajectory: Trajectory) -> str:
    """One episode turn by turn, with the probability of each action and the weight version it was sampled under."""
    num_tokens, num_own = len(trajectory.token_ids), int(trajectory.loss_mask.sum())
    lines = [
        f"Task `{trajectory.task.task_id}`: {'solved' if trajectory.success else 'not solved'}, reward {trajectory.reward:g}, "
        f"ended by {trajectory.end.value} after {len(trajectory.turns)} turns. {num_tokens} tokens, of which the agent wrote "
        f"{num_own}: only these are learnt from.",
        "",
        "| turn | the environment says | the agent does | probability | version | reward |",
        "|--:|---|---|--:|--:|--:|",
    ]
    for turn_idx, turn in enumerate(trajectory.turns):
        span = slice(turn.start_token_idx, turn.end_token_idx)
        probability = math.exp(float(trajectory.behavior_logprobs[span].sum()))
        versions = ", ".join(str(version) for version in sorted(set(trajectory.weight_versions[span].tolist())))
        observation, action = _cell(turn.observation), _cell(turn.action)
        lines.append(f"| {turn_idx} | {observation} | **{action}** | {probability:.2g} | {versions} | {turn.reward:g} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that cannot end a table's cell or row; nothing is shown as such."""
    return text.replace("|", "\\|").replace("\n", "<br>").strip() or "(nothing)"


def choose_examples(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The first that was solved and the first that was not, as far as there are such."""
    solved = [trajectory for trajectory in trajectories if trajectory.success]
    failed = [trajectory for trajectory in trajectories if not trajectory.success]
    return solved[:1] + failed[:1]


def _smooth(values: Sequence[float]) -> list[float]:
    smoothed: list[float] = []
    for value in values:
        smoothed.append(value if not smoothed else (1 - SMOOTHING) * smoothed[-1] + SMOOTHING * value)
    return smoothed


def _plain(axes: Axes, title: str, **labels: object) -> None:
    axes.set(title=title, **labels)
    if labels.get("xlabel") in WHOLE_NUMBERS:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, alpha=0.25)


def _plot_success(axes: Axes, log: RunLog) -> None:
    versions, rollout_success = log.series("train", "rollout_success")
    axes.plot(versions, rollout_success, alpha=0.25, color="0.5")
    axes.plot(versions, _smooth(rollout_success), color="0.5", label="training rollouts, smoothed")
    evals = evaluations(log)
    for mode, color in EVAL_MODES.items():
        values, errors = [getattr(e, mode) for e in evals], [getattr(e, f"{mode}_stderr") for e in evals]
        axes.errorbar([e.version for e in evals], values, yerr=errors, fmt="o-", capsize=3, color=color, label=f"held-out, {mode}")
    _plain(axes, headline(log), xlabel="weight version", ylabel="share of tasks solved", ylim=(0, 1.02))
    axes.legend(loc="lower right")


def _plot_time(axes: Axes, log: RunLog) -> None:
    parts = seconds_by_part(log)
    total_s = sum(parts.values())
    bars = axes.barh(list(parts), list(parts.values()), color="C2")
    axes.bar_label(bars, [f"{seconds:.0f} s, {seconds / total_s:.0%}" for seconds in parts.values()], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.35)  # room for the labels
    _plain(axes, f"Where {total_s / 60:.1f} minutes went", xlabel="wall seconds")
    axes.grid(visible=False)


def _plot_series(axes: Axes, log: RunLog, phase: str, names: Sequence[str], title: str, **labels: object) -> None:
    for name in names:
        steps, values = log.series(phase, name)
        marker = "o" if len(steps) < FEW_POINTS else None
        if steps:
            axes.plot(steps, values, marker=marker, markersize=3, label=name.replace("_", " "))
    if not axes.lines:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", color="0.5")
    elif len(axes.lines) > 1:
        axes.legend()
    _plain(axes, title, **labels)


def plot_curves(log: RunLog, path: Path) -> None:
    """Success, where the time went, warm-up loss, entropy and how much of the weights stayed as it was, as one picture."""
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 6, height_ratios=(1.3, 1))
    _plot_success(figure.add_subplot(grid[0, :4]), log)
    _plot_time(figure.add_subplot(grid[0, 4:]), log)
    warmup, entropy, unchanged = (figure.add_subplot(grid[1, start : start + 2]) for start in (0, 2, 4))
    losses = ("loss", "validation_loss")
    _plot_series(warmup, log, "warmup", losses, "Warm-up on demonstrations", xlabel="update", ylabel="nats per token")
    _plot_series(entropy, log, "train", ("entropy",), "Entropy of the policy", xlabel="weight version", ylabel="nats per token")
    share = ("bf16_unchanged_share",)
    _plot_series(unchanged, log, "train", share, "bf16 weights left unchanged", xlabel="weight version", ylabel="share")
    unchanged.set_ylim(0, 1.02)
    figure.savefig(path, dpi=110)


def write_report(log: RunLog, workdir: Path, trajectories: Sequence[Trajectory], sections: Sequence[str] = ()) -> Path:
    """Write report.md and curves.png into the workdir and return the former.

    Args:
        trajectories: of the last version; one that was solved and one that was not are shown.
        sections: lines of further ones, before the trajectories.
    """
    plot_curves(log, workdir / "curves.png")
    parts = [f"# {headline(log)}", "", "![curves](curves.png)", "", *_success_table(log), "## Where the time went", ""]
    parts += [*_time_table(log), *_replica_table(log), *sections]
    for trajectory in choose_examples(trajectories):
        parts += [f"## A task that was {'' if trajectory.success else 'not '}solved", "", trajectory_markdown(trajectory), ""]
    parts += ["## Files", "", *(f"- `{name}`: {what}" for name, what in FILES.items()), ""]
    path = workdir / "report.md"
    path.write_text("\n".join(parts))
    return path
