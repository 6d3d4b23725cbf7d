"""Runs of scripts.train that are killed at a chosen moment, and what is left of them: the parts of check_resume and its test.

A moment is named by what the run has done, never by the clock: a row of its log, or a checkpoint folder that is being written. A
run is killed by SIGKILL, so it gets no chance to tidy up. Runs are compared by bits: every array of the last checkpoint, the files
of the exported model, and all logged values that are not times or bytes on the wire.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from common.metrics import PHASES, Scalar, read_metrics

POLL_S = 0.001
"""Far below the tenths of a second that even a small checkpoint takes, so that a save is seen while it lasts."""
LOG_FILE = "train.log"
LOGGED_ONCE = tuple(phase for phase in PHASES if phase != "checkpoint")
"""Of a checkpoint only the time is logged, after its seal: a kill in between loses that row and nothing else."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """Kill `delay_s` after the row of (`phase`, `step`) came into the log; a "checkpoint", while it is being written."""

    phase: str
    step: int
    delay_s: float = 0.0

    def __str__(self) -> str:
        if self.phase == "checkpoint":
            return f"during the save of checkpoint {self.step}"
        kind = {"warmup": "warm-up update", "train": "version", "eval": "evaluation of version"}[self.phase]
        return f"{self.delay_s:.2f} s after {kind} {self.step}"


class TrainCommand:
    """One command line of scripts.train, to be given again and again on the same workdir."""

    def __init__(self, arguments: Sequence[str], workdir: Path) -> None:
        self.workdir = workdir
        self.command = [sys.executable, "-m", "scripts.train", *arguments, f"--workdir={workdir}"]

    def start(self) -> subprocess.Popen[bytes]:
        """Start it; what it prints is appended to train.log in the workdir."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        with (self.workdir / LOG_FILE).open("ab") as log:
            output: IO[bytes] = log
            return subprocess.Popen(self.command, stdout=output, stderr=subprocess.STDOUT)

    def finish(self) -> None:
        """Run it to its end.

        Raises:
            RuntimeError: it failed; the end of what it printed is in the text.
        """
        status = self.start().wait()
        if status != 0:
            raise RuntimeError(f"{' '.join(self.command)} ended with status {status}:\n{self.last_output()}")

    def last_output(self) -> str:
        return (self.workdir / LOG_FILE).read_text(errors="replace")[-2000:]

    def kill_at(self, moment: Moment) -> str:
        """Start it, kill it at `moment`, and say what the kill hit. A save that was over too soon is waited for again.

        Raises:
            RuntimeError: the run ended before.
        """
        while True:
            process = self.start()
            try:
                while not self._has_come(moment):
                    if process.poll() is not None:
                        raise RuntimeError(f"the run ended before the moment to kill it ({moment}) came:\n{self.last_output()}")
                    time.sleep(POLL_S)
                time.sleep(moment.delay_s)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            unfinished = unfinished_saves(self.workdir)
            if moment.phase != "checkpoint" or unfinished:
                return ", ".join(unfinished) or _last_row(self.workdir)

    def _has_come(self, moment: Moment) -> bool:
        if moment.phase == "checkpoint":
            steps = (_step_of(name) for name in _names(self.workdir / "checkpoints"))
            return any(step is not None and step >= moment.step and not self._is_sealed(step) for step in steps)
        rows = read_metrics(self.workdir / "metrics.jsonl")
        return any(row["phase"] == moment.phase and int(row["step"]) >= moment.step for row in rows)

    def _is_sealed(self, step: int) -> bool:
        return f"{step}.json" in _names(self.workdir / "checkpoints" / "seals")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return []


def _step_of(folder_name: str) -> int | None:
    """12 of "12" and of "12.some-temporary-suffix"."""
    number = folder_name.partition(".")[0]
    return int(number) if number.isdecimal() else None


def _last_row(workdir: Path) -> str:
    rows = read_metrics(workdir / "metrics.jsonl")
    return f"after row {rows[-1]['phase']} {rows[-1]['step']}" if rows else "before the first row"


def sealed_steps(workdir: Path) -> list[int]:
    """Steps of the checkpoints that were finished, oldest first."""
    seals = (Path(name) for name in _names(workdir / "checkpoints" / "seals"))
    return sorted(int(seal.stem) for seal in seals if seal.suffix == ".json" and seal.stem.isdecimal())


def unfinished_saves(workdir: Path) -> list[str]:
    """Checkpoint folders without a seal, whole ones and temporary ones, in words."""
    sealed = set(sealed_steps(workdir))
    return [f"unfinished {name}" for name in _names(workdir / "checkpoints") if _step_of(name) not in {None, *sealed}]


def last_arrays(workdir: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint by item and name."""
    import orbax.checkpoint as ocp  # pulls JAX in, which a test that only looks at folders does not need

    folder = workdir.absolute() / "checkpoints" / str(sealed_steps(workdir)[-1])
    arrays: dict[str, np.ndarray] = {}
    with ocp.StandardCheckpointer() as reader:
        for item in sorted(path for path in folder.iterdir() if (path / "_METADATA").exists()):
            restored: dict[str, Any] = reader.restore(item)
            arrays |= {f"{item.name}/{name}": np.asarray(value) for name, value in restored.items()}
    return arrays


def different_bits(workdir: Path, other: Path) -> list[str]:
    """Names of arrays and of exported files that differ between two finished runs."""
    ours, theirs = last_arrays(workdir), last_arrays(other)
    names = [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours
        or name not in theirs
        or (ours[name].dtype, ours[name].shape, ours[name].tobytes())
        != (theirs[name].dtype, theirs[name].shape, theirs[name].tobytes())
    ]
    for file in sorted({path.name for run in (workdir, other) for path in (run / "model").iterdir()}):
        contents = [(run / "model" / file).read_bytes() if (run / "model" / file).exists() else None for run in (workdir, other)]
        if contents[0] != contents[1]:
            names.append(f"model/{file}")
    return names


def different_rows(workdir: Path, other: Path) -> list[str]:
    """Rows of two finished runs' logs that are missing, double, or differ in a value that is no measurement of the machine."""
    logs = [_repeatable_rows(run) for run in (workdir, other)]
    double = [f"{phase} {step} is logged {len(found)} times" for (phase, step), found in logs[0].items() if len(found) != 1]
    return double + [
        f"{phase} {step} differs"
        for phase, step in sorted(logs[0].keys() | logs[1].keys())
        if logs[0].get((phase, step)) != logs[1].get((phase, step))
    ]


def _repeatable_rows(workdir: Path) -> dict[tuple[str, int], list[dict[str, Scalar]]]:
    rows: dict[tuple[str, int], list[dict[str, Scalar]]] = {}
    for row in read_metrics(workdir / "metrics.jsonl"):
        if row["phase"] in LOGGED_ONCE:
            values = {name: value for name, value in row.items() if not name.endswith("_s") and not name.startswith("wire_")}
            rows.setdefault((str(row["phase"]), int(row["step"])), []).append(values)
    return rows
