"""Progress in a log file: whole lines, not too many, and always the last one."""

from __future__ import annotations

import io

import pytest

from common.clock import FakeClock
from common.progress import LOG_INTERVAL_S, LogLines, ProgressBar, progress_bar


def lines_of(*, total: int, unit_s: float, num_done: int, initial: int = 0) -> list[str]:
    clock, file = FakeClock(), io.StringIO()
    with ProgressBar(LogLines("train", total, "version", initial=initial, file=file, clock=clock)) as bar:
        for done in range(num_done):
            clock.advance(unit_s)
            bar.advance(success=done / 10)
    assert "\r" not in file.getvalue()
    return file.getvalue().splitlines()


def test_quick_work_is_one_line_at_its_end() -> None:
    (line,) = lines_of(total=20, unit_s=0.1, num_done=20)
    assert line.startswith("train: 20/20 [00:02<00:00")
    assert "success=1.9" in line


def test_slow_work_tells_at_most_once_an_interval_how_far_it_is_and_how_long_it_will_take() -> None:
    lines = lines_of(total=20, unit_s=4.0, num_done=20)
    assert len(lines) <= 1 + 80 / LOG_INTERVAL_S
    assert lines[0].startswith("train: 4/20 [00:16<01:04")
    assert lines[-1].startswith("train: 20/20")


def test_work_that_is_cut_short_shows_where_it_stopped() -> None:
    assert lines_of(total=20, unit_s=0.1, num_done=3)[-1].startswith("train: 3/20")


def test_the_rate_of_a_resumed_bar_counts_only_what_was_done_since() -> None:
    (line,) = lines_of(total=20, unit_s=1.0, num_done=5, initial=15)
    assert line.startswith("train: 20/20 [00:05<00:00")
    assert "1.00version/s" in line


def test_nothing_to_do_says_nothing() -> None:
    assert lines_of(total=20, unit_s=1.0, num_done=0, initial=20) == []


def test_without_a_terminal_nested_bars_are_silent_and_others_write_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("rollout", 3, "episode", nested=True) as nested:
        nested.count("an episode")
    with progress_bar("warm-up", 3, "update") as bar:
        bar.count("an update")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "rollout" not in captured.err
    assert captured.err.startswith("warm-up: 1/3")
