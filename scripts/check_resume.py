"""Whether a run that is killed and started again ends with the same bits as one that is left alone.

First one run is left alone; then each kill has a run of its own: SIGKILL at a moment drawn from --seed (during a save, in the
warm-up, in reinforcement learning, in turn), and the same command again to its end. Compared are every array of the last
checkpoint, the exported model and every logged value but times. Rows: moment, hit, resumed_at, equal_bits, equal_rows, differs. The
exit status is 1 if anything differs. Takes --kills + 1 times as long as one run.

    python -m scripts.check_resume --config=configs/frozenlake_cpu.py --kills=3 --out=resume.json
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from absl import flags

from common.config import validate
from common.metrics import TIME_METRICS, read_metrics
from scripts import entry
from scripts.killed_runs import Moment, TrainCommand, different_bits, different_rows, sealed_steps

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/frozenlake_cpu.py")
_KILLS = flags.DEFINE_integer("kills", 3, "Runs to kill, one kill each.", lower_bound=1, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.", lower_bound=0, flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows": [...]} to.', flag_values=_FLAGS)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/check_resume", "Where the runs go, each in a folder that is emptied first.", flag_values=_FLAGS
)

KINDS = ("checkpoint", "warmup", "train")
COLUMNS = ("moment", "hit", "resumed_at", "equal_bits", "equal_rows")


def draw_moment(reference: Path, kind: str, rng: np.random.Generator) -> Moment:
    """A moment of this kind at which the undisturbed run was not done yet; within the piece of work that follows the row."""
    steps = [int(row["step"]) for row in read_metrics(reference / "metrics.jsonl") if row["phase"] == kind]
    if not steps:
        raise ValueError(f"the run has no {kind} rows to kill it at; give it some, or ask for fewer --kills")
    step = steps[int(rng.integers(len(steps) if kind == "checkpoint" else max(1, len(steps) - 1)))]
    if kind == "checkpoint":
        return Moment(phase=kind, step=step)
    following = [row for row in read_metrics(reference / "metrics.jsonl") if row["phase"] == kind and row["step"] == step + 1]
    work_s = sum(float(value) for row in following for name, value in row.items() if name in TIME_METRICS)
    return Moment(phase=kind, step=step, delay_s=float(rng.uniform(0, work_s)))


def check(arguments: list[str], reference: Path, workdir: Path, moment: Moment) -> dict[str, object]:
    """One killed and resumed run as a row."""
    run = TrainCommand(arguments, workdir)
    print(f"{workdir.name}: kill {moment}", flush=True)
    hit = run.kill_at(moment)
    sealed = sealed_steps(workdir)
    run.finish()
    bits, rows = different_bits(workdir, reference), different_rows(workdir, reference)
    return {
        "moment": str(moment),
        "hit": hit,
        "resumed_at": f"checkpoint {sealed[-1]}" if sealed else "the beginning",
        "equal_bits": not bits,
        "equal_rows": not rows,
        "differs": [*bits, *rows],
    }


def print_table(rows: list[dict[str, object]]) -> None:
    cells = [COLUMNS, *([{True: "yes", False: "NO"}.get(row[name], str(row[name])) for name in COLUMNS] for row in rows)]  # type: ignore[call-overload]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for row in rows:
        if row["differs"]:
            print(f"{row['moment']}: {row['differs']}")


def main() -> None:
    validate(_CONFIG.value)
    arguments = entry.config_arguments()
    base = Path(str(_WORKDIR.value))
    reference, *killed = [base / name for name in ("left_alone", *(f"killed{kill_idx}" for kill_idx in range(_KILLS.value)))]
    for workdir in (reference, *killed):
        shutil.rmtree(workdir, ignore_errors=True)
    print("a run that is left alone", flush=True)
    TrainCommand(arguments, reference).finish()
    rng = np.random.default_rng(_SEED.value)
    rows = []
    for kill_idx, workdir in enumerate(killed):
        moment = draw_moment(reference, KINDS[kill_idx % len(KINDS)], rng)
        rows.append(check(arguments, reference, workdir, moment))
        if _OUT.value:
            Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1))
    print_table(rows)
    if any(row["differs"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main)
