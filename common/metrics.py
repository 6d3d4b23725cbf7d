"""RunLog: what a run measured, as metrics.jsonl (one JSON object a line) and TensorBoard event files in the workdir.

Invariant: after a resume at some version the log holds each earlier version once and nothing later, also when the run was killed in
the middle of a line. Event files are only appended to; TensorBoard hides the overlap by `purge_step`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

PHASES = ("warmup", "train", "eval", "checkpoint")
Scalar = float | int | str | bool

TIME_METRICS = ("warmup_s", "rollout_s", "update_s", "publish_s", "checkpoint_s", "eval_s")
"""Wall seconds of the parts of a run, as they stand in its rows."""

TOKENS_PREFIX = "tokens_"
"""Before the name of a replica: how many tokens it sampled, where there are several."""


class Stopwatch:
    """Seconds by name, for one row: `with watch.part("rollout_s"): ...`, then `watch.seconds`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        assert name in TIME_METRICS, name
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started_s


def read_metrics(path: Path) -> list[dict[str, Scalar]]:
    """All whole rows of a metrics.jsonl; a torn last line is left out. A missing file has no rows."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and line.strip():
            rows.append(json.loads(line))
    return rows


def append_line(path: Path, row: Mapping[str, object]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row, allow_nan=True) + "\n")


class RunLog:
    """Writes rows of one phase (see PHASES) at an integer `step` each: warm-up update, version, or step of a checkpoint."""

    def __init__(self, workdir: Path, *, after: Mapping[str, int]) -> None:
        """Open the log of a workdir, dropping rows that the resumed run will write again.

        Args:
            after: for each phase the last step whose row stays; a phase not named starts empty.
        """
        from tensorboardX import SummaryWriter  # takes seconds where torch is installed, and `--help` needs none of it

        workdir.mkdir(parents=True, exist_ok=True)
        self._path = workdir / "metrics.jsonl"
        rows = [row for row in read_metrics(self._path) if int(row["step"]) <= after.get(str(row["phase"]), -1)]
        temporary = self._path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(temporary, self._path)
        self.rows: list[dict[str, Scalar]] = rows
        self._writers = {
            phase: SummaryWriter(str(workdir / "tensorboard" / phase), purge_step=after.get(phase, -1) + 1, flush_secs=10)
            for phase in PHASES
        }

    def write(self, phase: str, step: int, values: Mapping[str, Scalar]) -> None:
        row: dict[str, Scalar] = {"phase": phase, "step": step, **values}
        append_line(self._path, row)
        self.rows.append(row)
        for name, value in values.items():
            if not isinstance(value, str):
                self._writers[phase].add_scalar(name, float(value), step)

    def series(self, phase: str, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, in the order written."""
        found = [(int(row["step"]), float(row[name])) for row in self.rows if row["phase"] == phase and name in row]
        return [step for step, _ in found], [value for _, value in found]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
