"""The rows of bench_learning follow from the runs' logs, and finished seeds are read, not run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import Config
from common.metrics import RunLog, read_metrics
from common.workdir import record_config
from scripts import bench_learning


def write_log(workdir: Path, *, num_versions: int = 6) -> None:
    log = RunLog(workdir, after={})
    log.write("warmup", 1, {"loss": 1.0, "warmup_s": 30.0})
    for version in range(num_versions + 1):
        if version:
            log.write("train", version, {"bf16_unchanged_share": 0.5 + version / 20, "rollout_s": 6.0, "update_s": 3.0})
        if version % 2 == 0:
            success = {"sampled": 0.3 + version / 10, "greedy": 0.7}
            log.write("eval", version, {"num_tasks": 500, **success, "sampled_stderr": 0.02, "greedy_stderr": 0.01, "eval_s": 3.0})
    log.close()


def test_a_row_compares_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    write_log(tmp_path)
    row = bench_learning.row_of(read_metrics(tmp_path / "metrics.jsonl"), 2)
    assert (row["seed"], row["versions"]) == (2, 6)
    assert (row["sampled_before"], row["sampled_after"]) == (pytest.approx(0.3), pytest.approx(0.9))
    assert (row["greedy_before"], row["greedy_after"]) == (0.7, 0.7)
    assert (row["sampled_before_stderr"], row["greedy_after_stderr"]) == (0.02, 0.01)
    assert row["sampled_last3"] == pytest.approx((0.5 + 0.7 + 0.9) / 3)  # the one before reinforcement learning is none of them
    assert row["bf16_unchanged"] == pytest.approx(0.5 + 3.5 / 20)
    assert row["minutes"] == pytest.approx((30 + 6 * 9 + 4 * 3) / 60)


def test_the_table_shows_each_seed_and_the_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(tmp_path)
    rows = [bench_learning.row_of(read_metrics(tmp_path / "metrics.jsonl"), seed) for seed in range(2)]
    rows[1]["sampled_after"] = 0.7
    bench_learning.print_table(rows)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[:3] == ["seed", "versions", "sampled_before"]
    assert "0.900 ±0.020" in printed[1]
    assert "0.700 ±0.020" in printed[2]
    assert len({len(line) for line in printed[:3]}) == 1
    (spread,) = [line for line in printed if line.split()[:1] == ["sampled_after"]]
    assert spread.split()[1:] == ["mean", "0.800", "min", "0.700", "max", "0.900"]


def test_a_seed_is_finished_when_its_last_version_was_evaluated_and_its_report_written(tmp_path: Path) -> None:
    config = Config(seed=2, num_versions=6)
    assert not bench_learning.is_finished(tmp_path, config)
    record_config(tmp_path, config)
    write_log(tmp_path)
    assert not bench_learning.is_finished(tmp_path, config)
    (tmp_path / "report.md").write_text("# Report")
    assert bench_learning.is_finished(tmp_path, config)


def test_a_run_of_another_configuration_is_never_read_as_this_ones(tmp_path: Path) -> None:
    record_config(tmp_path, Config(seed=2))
    config = Config(seed=2)
    config.optim.lr = 1e-5
    with pytest.raises(ValueError, match=r"another configuration \(optim\.lr: 0\.0003 -> 1e-05\); name another --workdir"):
        bench_learning.is_finished(tmp_path, config)
