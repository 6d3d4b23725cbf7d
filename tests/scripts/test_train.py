"""scripts.train from the outside: what a run leaves behind, and what kills, signals and mistakes do to it.

Programs are compiled once and kept in a cache for all runs of this file. The bits of a killed and resumed run are compared with
those of a run that was left alone.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from common.metrics import read_metrics
from scripts.killed_runs import LOG_FILE, LOGGED_ONCE, Moment, TrainCommand, different_bits, different_rows, sealed_steps

ARGUMENTS = ["--config=tests/scripts/tiny_run.py"]
NUM_WARMUP, NUM_VERSIONS = 40, 4
DEADLINE_S = 300


@pytest.fixture(scope="module", autouse=True)
def one_device_and_a_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Environment of the runs: like a user's, not like that of the tests with their eight fake devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS", raising=False)
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield  # type: ignore[misc]


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory, one_device_and_a_cache: None) -> Path:
    workdir = tmp_path_factory.mktemp("left_alone")
    TrainCommand(ARGUMENTS, workdir).finish()
    return workdir


def failure(workdir: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and everything that was printed."""
    command = TrainCommand([*ARGUMENTS, *arguments], workdir).command
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.returncode, done.stdout + done.stderr


def wait_for_row(workdir: Path, phase: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(row["phase"] == phase for row in read_metrics(workdir / "metrics.jsonl")):
        assert time.monotonic() < deadline_s, f"no {phase} row after {DEADLINE_S} s"
        time.sleep(0.01)


def test_a_run_leaves_everything_in_its_workdir(left_alone: Path) -> None:
    names = {path.name for path in left_alone.iterdir()}
    assert names == {
        ".lock", LOG_FILE, "config.json", "metrics.jsonl", "tensorboard", "checkpoints", "report.md", "curves.png", "model"
    }  # fmt: skip
    assert {path.name for path in (left_alone / "tensorboard").iterdir()} >= set(LOGGED_ONCE)
    assert all(list(folder.glob("events.out.tfevents.*")) for folder in (left_alone / "tensorboard").iterdir())
    assert sealed_steps(left_alone) == [NUM_WARMUP + NUM_VERSIONS - 1, NUM_WARMUP + NUM_VERSIONS]
    assert "held-out tasks" in (left_alone / "report.md").read_text()
    printed = (left_alone / LOG_FILE).read_text()
    assert "sampled" in printed
    assert f"Report: {left_alone / 'report.md'}" in printed


def test_each_step_is_logged_once(left_alone: Path) -> None:
    rows = read_metrics(left_alone / "metrics.jsonl")
    logged = [(row["phase"], row["step"]) for row in rows if row["phase"] in LOGGED_ONCE]
    assert sorted(logged) == sorted(
        [("warmup", update) for update in range(1, NUM_WARMUP + 1)]
        + [("train", version) for version in range(1, NUM_VERSIONS + 1)]
        + [("eval", version) for version in (0, 2, 4)]
    )


def test_the_run_learns_so_that_equal_bits_say_something(left_alone: Path) -> None:
    rows = [row for row in read_metrics(left_alone / "metrics.jsonl") if row["phase"] == "train"]
    assert sum(row["grad_norm"] > 0 for row in rows) >= 2  # type: ignore[operator]
    assert min(float(row["bf16_unchanged_share"]) for row in rows) < 1


def test_the_exported_model_is_one_that_transformers_loads(left_alone: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(left_alone / "model", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(left_alone / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "S F G"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**ids).logits
    assert logits.shape[-1] == len(tokenizer)
    assert np.isfinite(logits.numpy()).all()


def test_a_run_killed_during_a_save_ends_with_the_bits_of_one_left_alone(left_alone: Path, tmp_path: Path) -> None:
    run = TrainCommand(ARGUMENTS, tmp_path / "run")
    hit = run.kill_at(Moment(phase="checkpoint", step=NUM_WARMUP + 2))
    assert hit.startswith("unfinished")
    assert 0 < sealed_steps(run.workdir)[-1] < NUM_WARMUP + NUM_VERSIONS
    run.finish()
    assert different_bits(run.workdir, left_alone) == []
    assert different_rows(run.workdir, left_alone) == []
    assert "not finished" in (run.workdir / LOG_FILE).read_text()  # the half-written checkpoint was named


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["warmup", "train", "checkpoint"])
def test_a_run_killed_at_a_random_moment_ends_with_the_bits_of_one_left_alone(left_alone: Path, tmp_path: Path, phase: str) -> None:
    rng = np.random.default_rng(int.from_bytes(os.urandom(4), "little"))
    last = {"warmup": NUM_WARMUP - 1, "train": NUM_VERSIONS - 1, "checkpoint": NUM_WARMUP + NUM_VERSIONS}[phase]
    moment = Moment(phase=phase, step=int(rng.integers(1, last + 1)), delay_s=float(rng.uniform(0, 0.2)) * (phase != "checkpoint"))
    run = TrainCommand(ARGUMENTS, tmp_path / "run")
    hit = run.kill_at(moment)
    run.finish()
    assert different_bits(run.workdir, left_alone) == [], f"killed {moment}, hit {hit}"
    assert different_rows(run.workdir, left_alone) == [], f"killed {moment}, hit {hit}"


@pytest.mark.slow
def test_a_finished_run_started_again_changes_no_bit_and_no_row(left_alone: Path, tmp_path: Path) -> None:
    run = TrainCommand(ARGUMENTS, tmp_path / "run")
    run.finish()
    run.finish()
    assert different_bits(run.workdir, left_alone) == []
    assert different_rows(run.workdir, left_alone) == []


@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGTERM, "warmup"), pytest.param(signal.SIGINT, "train", marks=pytest.mark.slow)],
)
def test_a_signal_ends_a_run_with_how_to_go_on(left_alone: Path, tmp_path: Path, number: signal.Signals, phase: str) -> None:
    run = TrainCommand(ARGUMENTS, tmp_path / "run")
    process = run.start()
    try:
        wait_for_row(run.workdir, phase)
        process.send_signal(number)
        assert process.wait(timeout=DEADLINE_S) == 128 + number
    finally:
        process.kill()
    assert run.last_output().splitlines()[-1] == (
        f"train: stopped by {number.name}. The same command goes on from the newest checkpoint."
    )
    assert "Traceback" not in run.last_output()


def test_a_finished_run_is_not_touched_by_a_command_of_another_configuration(left_alone: Path) -> None:
    before = {path: path.read_bytes() for path in left_alone.rglob("*") if path.is_file()}
    status, printed = failure(left_alone, "--config.seed=1")
    assert status == 2
    assert printed.startswith("train: ")
    assert "seed=0 in the checkpoint, 1 now" in printed
    assert {path: path.read_bytes() for path in left_alone.rglob("*") if path.is_file()} == before


def test_a_workdir_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, printed = failure(tmp_path)
    assert (status, len(printed.splitlines())) == (2, 1)
    assert f"--workdir={tmp_path} is in use by another process" in printed


def test_what_would_stop_a_run_after_the_warm_up_stops_it_before(tmp_path: Path) -> None:
    status, printed = failure(tmp_path / "run", "--config.eval.num_tasks=6")
    assert (status, len(printed.splitlines())) == (2, 1)
    assert "eval.num_tasks=6 needs 6 held_out tasks" in printed
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_disk_that_is_full_ends_a_run_in_words_and_the_same_command_goes_on(left_alone: Path, tmp_path: Path) -> None:
    run = TrainCommand(ARGUMENTS, tmp_path / "run")
    limited = ["bash", "-c", 'ulimit -f 60 && exec "$@"', "bash", *run.command]  # no file may grow beyond 60 KiB
    done = subprocess.run(limited, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "scripts/train.py" not in done.stderr  # no stack of ours; a thread of the storage library may leave one of its own
    assert "could not be written" in done.stderr.splitlines()[-1]
    assert "make room" in done.stderr.splitlines()[-1]
    run.finish()
    assert different_bits(run.workdir, left_alone) == []
