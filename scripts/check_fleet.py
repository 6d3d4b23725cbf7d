"""Whether a run whose replica is killed goes on as if nothing had happened: as many versions, every trajectory trained once.

For each replica process of the configuration there is one run: SIGKILL to its front (and its engine goes with it) or to its engine,
in the middle of a rollout drawn from --seed. Rows: replica, part, after_version, versions, trajectories, missing, twice, lost,
caught_up (0 if it came back just as a version was staged on all), share (of tokens) before, after and in the last version, sampled,
least (what success must reach), ok. `least` is the lowest of the seeds in --spread, a file that bench_learning wrote, less its
standard error. The exit status is 1 if anything is not as it should be.

    python -m scripts.check_fleet --config=configs/mixed_cpu.py --spread=learning.json --out=fleet.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
from absl import flags

from common.config import Config, validate
from common.metrics import Scalar, read_metrics
from common.rollout.evaluate import numbers_in, token_shares
from scripts import entry
from scripts.fleet import LOGS, PRIVATE
from scripts.killed_runs import TrainCommand

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/mixed_cpu.py")
_PART = flags.DEFINE_enum("part", "front", ["front", "engine", "both"], "Which process of a replica to kill.", flag_values=_FLAGS)
_SPREAD = flags.DEFINE_string("spread", None, "JSON of bench_learning: seeds that were left alone.", flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.", lower_bound=0, flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows": [...]} to.', flag_values=_FLAGS)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/check_fleet", "Where the runs go, each in a folder that is emptied first.", flag_values=_FLAGS
)

PIDS = {"front": "pid", "engine": "engine_pid"}
COLUMNS = ("replica", "part", "after_version", "versions", "trajectories", "missing", "twice", "lost", "caught_up", "share_before",
           "share_after", "share_last", "sampled", "least", "ok")  # fmt: skip
POLL_S = 0.005


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """SIGKILL to a part of a replica, `share` of a rollout's duration after the row of `after_version` came into the log."""

    replica: str
    part: str
    after_version: int
    share: float

    def carry_out(self, run: TrainCommand) -> None:
        """Start the run, kill when the moment has come, and let the run go on to its end.

        Raises:
            RuntimeError: the run ended before, or failed after.
        """
        process = run.start()
        try:
            while not (rows := [row for row in train_rows(run.workdir) if row["step"] == self.after_version]):
                if process.poll() is not None:
                    raise RuntimeError(f"the run ended before version {self.after_version}:\n{run.last_output()}")
                time.sleep(POLL_S)
            time.sleep(self.share * float(rows[0]["rollout_s"]))
            told = json.loads((run.workdir / PRIVATE / f"{self.replica}.json").read_text())
            os.kill(int(told[PIDS[self.part]]), signal.SIGKILL)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if status != 0:
            raise RuntimeError(f"the run ended with status {status} after {self} was killed:\n{run.last_output()}")


def train_rows(workdir: Path) -> list[dict[str, Scalar]]:
    return [row for row in read_metrics(workdir / "metrics.jsonl") if row["phase"] == "train"]


def judge(config: Config, workdir: Path, kill: Kill, least: float | None) -> dict[str, Scalar | None]:
    """The row of one finished run."""
    rows = train_rows(workdir)
    trained = [number for row in rows for number in numbers_in(str(row["trajectories"]))]
    expected = config.num_versions * config.grpo.prompts_per_step * config.grpo.group_size
    news = (workdir / LOGS / "fleet.log").read_text()
    caught_up = f"Replica {kill.replica} has caught up"
    shares = [
        token_shares(row for row in rows if (int(row["step"]) <= kill.after_version) is before).get(f"share_{kill.replica}", 0.0)
        for before in (True, False)
    ]
    share_last = token_shares(rows[-1:]).get(f"share_{kill.replica}", 0.0)
    evaluations = [row for row in read_metrics(workdir / "metrics.jsonl") if row["phase"] == "eval"]
    sampled = float(max(evaluations, key=lambda row: int(row["step"]))["sampled"])
    result: dict[str, Scalar | None] = {
        "replica": kill.replica,
        "part": kill.part,
        "after_version": kill.after_version,
        "versions": len({row["step"] for row in rows}),
        "trajectories": len(trained),
        "missing": expected - len(set(trained)),
        "twice": len(trained) - len(set(trained)),
        "lost": news.count(f"Lost replica {kill.replica}:"),
        "caught_up": news.count(caught_up),
        "share_before": shares[0],
        "share_after": shares[1],
        "share_last": share_last,
        "sampled": sampled,
        "least": least,
    }
    result["ok"] = (
        [int(row["step"]) for row in rows] == list(range(1, config.num_versions + 1))
        and result["missing"] == result["twice"] == 0
        and result["lost"] == 1
        and share_last > 0  # it was back, and used, at the end
        and (least is None or sampled >= least)
    )
    return result


def least_of(spread: Path) -> float:
    """What the seeds that were left alone reached at least, less one standard error."""
    rows = json.loads(spread.read_text())["rows"]
    lowest = min(rows, key=lambda row: row["sampled_after"])
    return float(lowest["sampled_after"]) - float(lowest["sampled_after_stderr"])


def print_table(rows: list[dict[str, Scalar | None]]) -> None:
    cells = [list(COLUMNS)]
    for row in rows:
        values = [row[name] for name in COLUMNS]
        cells.append([f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value) for value in values])
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> None:
    config = _CONFIG.value
    validate(config)
    names = [replica.name for replica in config.fleet.replicas if replica.address is None]
    if not names or config.num_versions < 4:
        raise ValueError("the configuration needs fleet.replicas that the run starts itself, and num_versions of 4 or more")
    least = least_of(Path(_SPREAD.value)) if _SPREAD.value else None
    rng = np.random.default_rng(_SEED.value)
    rows: list[dict[str, Scalar | None]] = []
    for part in PIDS if _PART.value == "both" else [_PART.value]:
        for name in names:
            after = int(rng.integers(config.num_versions // 4, config.num_versions // 2 + 1))
            kill = Kill(replica=name, part=part, after_version=after, share=float(rng.uniform(0.1, 0.7)))
            workdir = Path(str(_WORKDIR.value)) / f"{name}_{part}"
            shutil.rmtree(workdir, ignore_errors=True)
            print(f"{workdir}: the {part} of {name} is killed in the rollout after version {after}", flush=True)
            kill.carry_out(TrainCommand(entry.config_arguments(), workdir))
            rows.append(judge(config, workdir, kill, least))
            if _OUT.value:
                Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1))
    print_table(rows)
    if not all(row["ok"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main)
