"""The report says what was logged, whatever a run has or lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.metrics import RunLog
from common.report import choose_examples, evaluations, headline, seconds_by_part, summary_lines, trajectory_markdown, write_report
from common.types import EpisodeEnd
from tests.common.rollout.trajectories import make_trajectory


def evaluation(sampled: float, greedy: float, eval_s: float = 2.0) -> dict[str, float]:
    return {
        "num_tasks": 500,
        "sampled": sampled,
        "sampled_stderr": 0.02,
        "greedy": greedy,
        "greedy_stderr": 0.01,
        "eval_s": eval_s,
    }


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    log = RunLog(tmp_path, after={})
    for update in range(1, 4):
        log.write("warmup", update, {"loss": 3.0 - update, "warmup_s": 1.0})
    log.write("checkpoint", 3, {"checkpoint_s": 0.5})
    log.write("eval", 0, evaluation(0.3, 0.7))
    for version in (1, 2):
        log.write("train", version, {"rollout_success": 0.4, "entropy": 0.5, "rollout_s": 1.5, "update_s": 0.5, "publish_s": 0.25})
    log.write("eval", 2, evaluation(0.8, 0.9))
    log.close()
    return log


def test_the_summary_compares_the_first_and_the_last_evaluation(log: RunLog) -> None:
    title, sampled, greedy, time = summary_lines(log)
    assert "500 held-out tasks" in title
    assert "after 2 versions" in title
    assert sampled.split() == ["sampled", "0.300", "±", "0.020", "0.800", "±", "0.020"]
    assert greedy.split() == ["greedy", "0.700", "±", "0.010", "0.900", "±", "0.010"]
    assert time.startswith("Time 0.2 min")
    assert title.index("before") == sampled.index("0.300") == greedy.index("0.700")
    assert headline(log) == "Sampled success 0.30 → 0.80 on 500 held-out tasks in 2 versions"


def test_the_parts_of_the_time_add_up_over_all_rows(log: RunLog) -> None:
    assert seconds_by_part(log) == {"warmup": 3.0, "rollout": 3.0, "update": 1.0, "publish": 0.5, "checkpoint": 0.5, "eval": 4.0}


def test_evaluations_come_in_order_of_version_even_if_one_was_made_up_for_later(tmp_path: Path) -> None:
    log = RunLog(tmp_path, after={})
    for version in (2, 0, 1):
        log.write("eval", version, evaluation(0.1 * version, 0.5))
    log.close()
    assert [e.version for e in evaluations(log)] == [0, 1, 2]


def test_a_report_shows_one_solved_and_one_failed_task(log: RunLog, tmp_path: Path) -> None:
    solved = [make_trajectory(success=True, trajectory_id=idx) for idx in (3, 4)]
    failed = [make_trajectory(success=False, trajectory_id=idx, end=EpisodeEnd.TURN_CAP) for idx in (1, 2)]
    assert choose_examples([*failed, *solved]) == [solved[0], failed[0]]
    assert choose_examples(failed) == failed[:1]
    text = write_report(log, tmp_path, [*failed, *solved]).read_text()
    assert text.index("## A task that was solved") < text.index("`test/held_out/3`") < text.index("## A task that was not solved")
    assert "ended by turn_cap" in text
    assert "| 2 | 0.800 ± 0.020 | 0.900 ± 0.010 | 500 |" in text
    assert "| warmup | 3.0 | 25% |" in text
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_turn_shows_its_text_probability_version_and_reward() -> None:
    lines = trajectory_markdown(make_trajectory(success=True, observation="a | b\nc", action="")).splitlines()
    assert "10 tokens, of which the agent wrote 4" in lines[0]
    assert lines[-2:] == [
        "| 0 | a \\| b<br>c | **(nothing)** | 0.25 | 7 | 0 |",
        "| 1 | a \\| b<br>c | **(nothing)** | 0.25 | 7 | 1 |",
    ]


def test_a_run_that_has_done_nothing_yet_has_a_report(tmp_path: Path) -> None:
    log = RunLog(tmp_path, after={})
    log.close()
    assert summary_lines(log) == []
    assert write_report(log, tmp_path, []).read_text().startswith("# Not evaluated yet")
    assert (tmp_path / "curves.png").exists()
