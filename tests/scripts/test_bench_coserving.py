"""The whole benchmark, front and load over HTTP included, on engines that sleep as long as a step would take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COLUMNS = [
    "variant",
    "backend",
    "trace",
    "repeat",
    "affinity",
    "busy_share_alone",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "attainment",
    "attainment_every_gap",
    "rollout_tokens_per_s",
    "harvest",
]


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is the device, another has the clients")
def test_every_variant_gives_a_row_with_all_columns_and_a_cut_off_run_goes_on(tmp_path: Path) -> None:
    out, decisions = tmp_path / "rows.json", tmp_path / "decisions"
    command = [sys.executable, "-m", "scripts.bench_coserving", "--backend=emulated", "--quick", "--window=0,4", f"--out={out}"]
    first = subprocess.run([*command, "--variants=naive"], capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    rest = [*command, "--resume", "--variants=naive,idle_only,ours,sched_idle,ours_commit", f"--decisions={decisions}"]
    second = subprocess.run(rest, capture_output=True, text=True, timeout=600)
    assert second.returncode == 0, second.stderr
    report = json.loads(out.read_text())
    rows = {row["variant"]: row for row in report["rows"] if row["requests"]}
    assert sorted(rows) == sorted(["serving_alone", "naive", "idle_only", "ours", "sched_idle", "ours_commit"])
    assert len(report["rows"]) == len(rows) + 3  # rollouts alone, at three numbers of streams; nothing was measured twice
    for variant, row in rows.items():
        missing = [name for name in COLUMNS if name not in row and (name, variant) != ("harvest", "serving_alone")]
        assert not missing, f"{variant} lacks {missing}"
        assert row["affinity"] == [0]
        assert row["client_affinity"] == [1]
        assert not row["errors"]
    assert rows["sched_idle"]["idle_scheduler"] == os.SCHED_IDLE
    assert rows["naive"]["rollout_tokens_per_s"] > 0  # the others may refuse every step on a machine that keeps them waiting
    assert rows["serving_alone"]["rollout_tokens_per_s"] == 0
    trace = json.loads((decisions / "ours.0.json").read_text())
    assert {"serving", "rollout"} <= {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert "idle_only" in second.stdout
