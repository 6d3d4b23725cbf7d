"""How much an agent learns: success on held-out tasks before and after reinforcement learning, over several seeds.

Each seed is one whole run of scripts.train in a process and workdir of its own; the figures are read from that run's log, so a
benchmark that was cut off goes on where it stopped. Rows: seed, sampled_before, sampled_after, greedy_before, greedy_after, each
with its _stderr, the means of the last three evaluations, the mean share of bf16 elements that a version left unchanged, the share
of tokens that each of several replicas sampled, minutes.

    python -m scripts.bench_learning --config=configs/frozenlake_cpu.py --seeds=3 --out=learning.json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from common.config import Config, validate
from common.metrics import TIME_METRICS, Scalar, read_metrics
from common.rollout.evaluate import token_shares
from common.workdir import changed_fields
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/frozenlake_cpu.py")
_SEEDS = flags.DEFINE_integer("seeds", 3, "Number of seeds: 0, 1, ...", lower_bound=1, flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows": [...]} to.', flag_values=_FLAGS)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where the runs go (default runs/bench_learning/NAME); finished ones are kept.", flag_values=_FLAGS
)

LAST_EVALUATIONS = 3
MEASURED = ("sampled", "greedy")


def row_of(rows: list[dict[str, Scalar]], seed: int) -> dict[str, Scalar]:
    """One seed's figures from the rows of its metrics.jsonl."""
    evals = sorted((row for row in rows if row["phase"] == "eval"), key=lambda row: int(row["step"]))
    result: dict[str, Scalar] = {"seed": seed, "versions": int(evals[-1]["step"])}
    for mode in MEASURED:
        for name, row in (("before", evals[0]), ("after", evals[-1])):
            result[f"{mode}_{name}"] = row[mode]
            result[f"{mode}_{name}_stderr"] = row[f"{mode}_stderr"]
        last = [float(row[mode]) for row in evals[1:][-LAST_EVALUATIONS:]]
        result[f"{mode}_last{LAST_EVALUATIONS}"] = statistics.fmean(last) if last else float("nan")
    unchanged = [float(row["bf16_unchanged_share"]) for row in rows if "bf16_unchanged_share" in row]
    result["bf16_unchanged"] = statistics.fmean(unchanged) if unchanged else float("nan")
    result |= token_shares(rows)
    result["minutes"] = sum(float(value) for row in rows for name, value in row.items() if name in TIME_METRICS) / 60
    return result


def print_table(rows: list[dict[str, Scalar]]) -> None:
    """Rows and, below them, the mean and the range over the seeds."""
    names = [name for name in rows[0] if not name.endswith("_stderr")]
    print("  ".join(f"{name:>15}" for name in names))
    for row in rows:
        cells = []
        for name in names:
            value = row[name]
            text = str(value) if isinstance(value, int) else f"{value:.3f}"
            if f"{name}_stderr" in row:
                text += f" ±{row[f'{name}_stderr']:.3f}"
            cells.append(f"{text:>15}")
        print("  ".join(cells))
    print("over seeds:")
    for name in names[2:]:
        values = [float(row[name]) for row in rows]
        print(f"  {name:<16} mean {statistics.fmean(values):.3f}  min {min(values):.3f}  max {max(values):.3f}")


def is_finished(workdir: Path, config: Config) -> bool:
    """Whether the run there came to its end: then it is read and not started again.

    Raises:
        ValueError: it is a run of another configuration, whose figures would pass for this one's.
    """
    if changed := changed_fields(workdir, config):
        raise ValueError(f"{workdir} holds a run of another configuration ({'; '.join(changed)}); name another --workdir")
    rows = read_metrics(workdir / "metrics.jsonl")
    is_evaluated = any(row["phase"] == "eval" and row["step"] == config.num_versions for row in rows)
    return is_evaluated and (workdir / "report.md").exists()


def main() -> None:
    config = _CONFIG.value
    validate(config)
    config_path = config_flags.get_config_filename(flags.FLAGS[entry.CONFIG_FLAG])
    arguments = entry.config_arguments()
    base = Path(_WORKDIR.value or f"runs/bench_learning/{Path(config_path).stem}")
    rows = []
    for seed in range(_SEEDS.value):
        workdir, config.seed = base / f"seed{seed}", seed
        command = [sys.executable, "-m", "scripts.train", *arguments, f"--config.seed={seed}", f"--workdir={workdir}"]
        if is_finished(workdir, config):
            print(f"seed {seed}: finished before, read from {workdir}", flush=True)
        else:
            started_s = time.monotonic()
            print(f"seed {seed}: {' '.join(command[1:])}", flush=True)
            if (status := subprocess.run(command).returncode) != 0:
                sys.exit(f"seed {seed} ended with status {status}; the same command goes on with it")
            print(f"seed {seed} took {(time.monotonic() - started_s) / 60:.1f} min", flush=True)
        rows.append(row_of(read_metrics(workdir / "metrics.jsonl"), seed))
        if _OUT.value:
            Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1))
    print_table(rows)


if __name__ == "__main__":
    entry.run(main, after_interrupt="The same command goes on; finished seeds are kept.")
