"""The moments that check_resume draws, and that its comparison sees a single bit and a single row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.metrics import RunLog
from scripts.check_resume import draw_moment, print_table
from scripts.killed_runs import Moment, different_rows, sealed_steps, unfinished_saves


def write_log(workdir: Path, *, losses: tuple[float, ...] = (3.0, 2.0, 1.0)) -> None:
    log = RunLog(workdir, after={})
    for update, loss in enumerate(losses, start=1):
        log.write("warmup", update, {"loss": loss, "warmup_s": 0.5})
    log.write("checkpoint", 3, {"checkpoint_s": 0.1})
    log.close()


def test_moments_lie_within_the_run_and_depend_on_the_seed_alone(tmp_path: Path) -> None:
    write_log(tmp_path)
    moments = [draw_moment(tmp_path, "warmup", np.random.default_rng(seed)) for seed in range(30)]
    assert {moment.step for moment in moments} == {1, 2}  # after the last update there is no warm-up left to kill
    assert all(0 <= moment.delay_s <= 0.5 for moment in moments)
    assert moments[3] == draw_moment(tmp_path, "warmup", np.random.default_rng(3))
    assert draw_moment(tmp_path, "checkpoint", np.random.default_rng(0)) == Moment(phase="checkpoint", step=3)


def test_a_kind_of_moment_that_the_run_does_not_have_is_named(tmp_path: Path) -> None:
    write_log(tmp_path)
    with pytest.raises(ValueError, match="no train rows"):
        draw_moment(tmp_path, "train", np.random.default_rng(0))


def test_rows_that_differ_are_missing_or_double_are_named_and_times_are_not(tmp_path: Path) -> None:
    reference, same, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    write_log(reference)
    write_log(same)
    log = RunLog(same, after={"warmup": 2})
    log.write("warmup", 3, {"loss": 1.0, "warmup_s": 0.9})
    log.close()
    assert different_rows(same, reference) == []
    write_log(other, losses=(3.0, 2.5))
    assert different_rows(other, reference) == ["warmup 2 differs", "warmup 3 differs"]
    with (same / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "warmup", "step": 3, "loss": 1.0}\n')
    assert "warmup 3 is logged 2 times" in different_rows(same, reference)


def test_a_save_is_unfinished_until_its_seal_is_there(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for name in ("5", "6", "7.orbax-checkpoint-tmp", "seals"):
        (checkpoints / name).mkdir(parents=True)
    (checkpoints / "seals" / "5.json").write_text("{}")
    (checkpoints / "seals" / "6.tmp").write_text("{")
    assert sealed_steps(tmp_path) == [5]
    assert unfinished_saves(tmp_path) == ["unfinished 6", "unfinished 7.orbax-checkpoint-tmp"]


def test_the_table_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, object] = {"moment": "m", "hit": "h", "resumed_at": "checkpoint 5", "equal_bits": False, "equal_rows": True}
    print_table([row | {"differs": ["params/embed_tokens.value"]}])
    header, line, detail = capsys.readouterr().out.splitlines()
    assert header.split() == ["moment", "hit", "resumed_at", "equal_bits", "equal_rows"]
    assert line.split() == ["m", "h", "checkpoint", "5", "NO", "yes"]
    assert "params/embed_tokens.value" in detail
