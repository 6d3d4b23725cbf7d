"""The run log after a kill and a resume."""

from pathlib import Path

from common.metrics import RunLog, read_metrics


def test_a_resumed_log_holds_each_step_once(tmp_path: Path) -> None:
    log = RunLog(tmp_path, after={})
    log.write("warmup", 0, {"loss": 2.0})
    for version in (1, 2, 3, 4):
        log.write("train", version, {"reward": version / 10})
    log.close()
    resumed = RunLog(tmp_path, after={"warmup": 0, "train": 2})
    resumed.write("train", 3, {"reward": 0.3})
    resumed.close()
    assert [(row["phase"], row["step"]) for row in read_metrics(tmp_path / "metrics.jsonl")] == [
        ("warmup", 0),
        ("train", 1),
        ("train", 2),
        ("train", 3),
    ]


def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"phase": "train", "step": 1, "reward": 0.5}\n{"phase": "train", "st')
    assert read_metrics(path) == [{"phase": "train", "step": 1, "reward": 0.5}]
    log = RunLog(tmp_path, after={"train": 1})
    log.write("train", 2, {"reward": 0.6})
    log.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_a_fresh_run_starts_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"phase": "train", "step": 1}\n')
    log = RunLog(tmp_path, after={})
    assert log.rows == []
    assert log.series("train", "reward") == ([], [])
    log.close()
