"""The lengths that are reported are those of the trajectories."""

from __future__ import annotations

from pathlib import Path

import pytest
from absl import app

from scripts import bench_lengths


def test_rows_and_plot_follow_from_the_trajectories(tmp_path: Path) -> None:
    config = bench_lengths.named_config("household_cpu")
    trajectories = bench_lengths.demonstrations(config, 20, 0.0)
    row = bench_lengths.row_of("household_cpu", "expert", trajectories)
    turns = sorted(len(trajectory.turns) for trajectory in trajectories)
    assert row["episodes"] == 20
    assert row["success"] == 1.0
    assert row["turns_max"] == turns[-1]
    assert turns[8] <= row["turns_p50"] <= turns[11]  # type: ignore[operator]
    assert row["tokens_max"] == max(len(trajectory.token_ids) for trajectory in trajectories)
    bench_lengths.plot({("household_cpu", "expert"): trajectories}, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_random_actions_make_the_tail_longer() -> None:
    config = bench_lengths.named_config("household_cpu")
    expert, noisy = (bench_lengths.demonstrations(config, 60, share) for share in (0.0, 0.4))
    assert sum(len(trajectory.turns) for trajectory in noisy) > sum(len(trajectory.turns) for trajectory in expert)


def test_an_unknown_configuration_is_named() -> None:
    with pytest.raises(app.UsageError, match=r"no configs/nosuch\.py"):
        bench_lengths.named_config("nosuch")
