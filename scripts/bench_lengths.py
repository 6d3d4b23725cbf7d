"""How long trajectories are: turns and tokens at the 50th, 90th and 99th percentile, as a table, JSON rows and a plot.

Played on held-out tasks by the environment's expert, by the expert with the warm-up's share of random actions, and, where a
finished run is named, by its trained policy at temperature 1. Tokens count the whole trajectory: prompts, observations, turns.
Rows: task, player, episodes, success, and p50, p90, p99, max of turns and tokens.

    python -m scripts.bench_lengths --out=lengths.json [--configs=household_cpu,frozenlake_mixed_cpu] [--workdirs=runs/a,]
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from absl import app, flags

from common import check_installation
from common.config import Config, validate
from common.rollout.chat import ChatTokenizer
from common.rollout.demonstrations import demonstrate
from common.rollout.environment import load_task_suite
from common.rollout.evaluate import success_rate
from common.types import Split, Trajectory
from scripts import entry

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_FLAGS = entry.flags_of(__name__)
_CONFIGS = flags.DEFINE_list(
    "configs", ["household_cpu", "frozenlake_mixed_cpu"], "Names of files under configs/, without .py.", flag_values=_FLAGS
)
_WORKDIRS = flags.DEFINE_list(
    "workdirs", [], "Finished runs of these configurations, in the same order; an empty name: none.", flag_values=_FLAGS
)
_EPISODES = flags.DEFINE_integer("episodes", 500, "Episodes of each player.", lower_bound=1, flag_values=_FLAGS)
_OUT = flags.DEFINE_string(
    "out", None, 'JSON file to write {"rows": [...]} to; the plot goes beside it as .png.', required=True, flag_values=_FLAGS
)

PERCENTILES = (50, 90, 99)
NUM_COLUMNS = 2


def named_config(name: str) -> Config:
    """The configuration of configs/NAME.py, validated."""
    if importlib.util.find_spec(f"configs.{name}") is None:
        raise app.UsageError(f"--configs: there is no configs/{name}.py")
    config = importlib.import_module(f"configs.{name}").get_config()
    validate(config)
    return config


def demonstrations(config: Config, num_episodes: int, random_action_share: float) -> list[Trajectory]:
    suite = load_task_suite(config.env.factory, config.env.options)
    chat = ChatTokenizer.from_vocabulary(suite.vocabulary())

    async def play_all() -> list[Trajectory]:
        return [
            await demonstrate(
                suite,
                suite.task(Split.HELD_OUT, task_idx),
                chat,
                np.random.default_rng([config.seed, task_idx]),
                random_action_share,
                max_context_tokens=config.sampler.max_context_tokens,
                max_turn_tokens=config.sampler.max_turn_tokens,
            )
            for task_idx in range(num_episodes)
        ]

    return asyncio.run(play_all())


def policy_rollouts(config: Config, workdir: Path, num_episodes: int) -> list[Trajectory]:
    """Episodes of the model that a finished run left in its workdir."""
    from common.rollout.runner import RolloutRunner
    from rose_jax.mesh import make_mesh
    from rose_jax.policy import build_policy
    from rose_jax.replica import replica_of_policy

    config.model.checkpoint = str(workdir / "model")
    suite = load_task_suite(config.env.factory, config.env.options)
    policy = build_policy(config, suite, make_mesh(config.mesh))
    with RolloutRunner(config, suite, policy.chat, replica_of_policy(config, policy, version=config.num_versions)) as runner:
        runner.sync_weights(config.num_versions)
        return runner.evaluate(num_episodes, temperature=1.0)


def row_of(task: str, player: str, trajectories: Sequence[Trajectory]) -> dict[str, object]:
    row: dict[str, object] = {"task": task, "player": player, "episodes": len(trajectories)}
    row["success"] = success_rate(trajectories).rate
    lengths = {
        "turns": [len(trajectory.turns) for trajectory in trajectories],
        "tokens": [len(trajectory.token_ids) for trajectory in trajectories],
    }
    for name, values in lengths.items():
        for percent, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True):
            row[f"{name}_p{percent}"] = round(float(value), 1)
        row[f"{name}_max"] = max(values)
    return row


def plot(played: dict[tuple[str, str], Sequence[Trajectory]], path: Path) -> None:
    """Share of trajectories longer than x, on a log scale: a long tail is a line that falls slowly."""
    figure, axes = plt.subplots(1, NUM_COLUMNS, figsize=(11, 4), constrained_layout=True)
    for (task, player), trajectories in played.items():
        counts = ([len(item.turns) for item in trajectories], [len(item.token_ids) for item in trajectories])
        for axis, values in zip(axes, counts, strict=True):
            share_longer = 1.0 - np.arange(len(values)) / len(values)
            axis.step(np.sort(values), share_longer, where="post", label=f"{task}, {player}")
    for axis, name in zip(axes, ("turns", "tokens"), strict=True):
        axis.set(xlabel=f"{name} per trajectory", ylabel="share at least as long", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def print_table(rows: Sequence[dict[str, object]]) -> None:
    widths = {name: max(len(name), *(len(_cell(row[name])) for row in rows)) for name in rows[0]}
    print("  ".join(f"{name:>{width}}" for name, width in widths.items()))
    for row in rows:
        print("  ".join(f"{_cell(row[name]):>{width}}" for name, width in widths.items()))


def _cell(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(argv: list[str]) -> None:
    check_installation(__file__)
    if argv[1:]:
        raise app.UsageError(f"unknown arguments {argv[1:]}")
    if _WORKDIRS.value and len(_WORKDIRS.value) != len(_CONFIGS.value):
        raise app.UsageError(f"--workdirs names {len(_WORKDIRS.value)} runs for {len(_CONFIGS.value)} configurations")
    played: dict[tuple[str, str], Sequence[Trajectory]] = {}
    for name, workdir in zip(_CONFIGS.value, _WORKDIRS.value or [""] * len(_CONFIGS.value), strict=True):
        config = named_config(name)
        noise = config.warmup.random_action_share
        played[name, "expert"] = demonstrations(config, _EPISODES.value, 0.0)
        played[name, f"expert, {noise:.0%} random"] = demonstrations(config, _EPISODES.value, noise)
        if workdir:
            played[name, "policy"] = policy_rollouts(config, Path(workdir), _EPISODES.value)
    rows = [row_of(task, player, trajectories) for (task, player), trajectories in played.items()]
    print_table(rows)
    out = Path(_OUT.value)
    out.write_text(json.dumps({"rows": rows}, indent=1))
    plot(played, out.with_suffix(".png"))
    print(f"Plot: {out.with_suffix('.png')}")


if __name__ == "__main__":
    app.run(main)
