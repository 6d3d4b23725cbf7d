"""Co-serving replicas of a run: their command, their traffic, and a whole run that is served beside and trained from."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.metrics import read_metrics
from common.report_coserving import coserving_row
from common.traffic.log import TRAFFIC, read_traffic
from common.transfer.store.memory import MemoryStore
from scripts import entry
from scripts.fleet import LOGS, PRIVATE, open_fleet
from scripts.killed_runs import TrainCommand
from scripts.serve_coserving import admission_of, longest_step
from scripts.traffic import OnlineTraffic, TrafficError
from tests.common.rollout.test_fleet import is_running
from tests.scripts import tiny_coserve_run

CONFIG = "--config=tests/scripts/tiny_coserve_run.py"


def test_only_the_coserving_replica_is_told_to_serve_two_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "config_arguments", lambda: [CONFIG])
    with contextlib.ExitStack() as stack:
        fleet: Any = open_fleet(tiny_coserve_run.get_config(), tmp_path, MemoryStore(), stack)
        alone, shared = (member.origin._command for member in fleet._members)
    assert "--coserve" in shared
    assert "--coserve" not in alone
    assert "--nowarm_up" not in shared  # what is compiled in mid-run would miss objectives


def test_the_policy_of_admission_is_what_the_configuration_says() -> None:
    config = tiny_coserve_run.get_config()
    config.coserving.step_share, config.coserving.spend_slack = 0.2, False
    policy = admission_of(config)
    assert policy.step_bound_s == pytest.approx(0.2 * 5.0)
    assert not policy.settings.spend_slack
    assert policy.objectives.of_request("serving", "any").tpot_s == 2.0
    longest = longest_step(config.coserving.sampler)
    assert longest.num_tokens == config.coserving.sampler.max_step_tokens


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url=http://127.0.0.1:1"], ["the front at http://127.0.0.1:1 cannot be reached", "start scripts.serve --coserve"]),
        (["--ready_file=/nowhere/ready.json"], ["--ready_file=/nowhere/ready.json has no url", "is it started?"]),
        (["--url=http://127.0.0.1:1", "--config.coserving.ttft_s=0"], ["coserving.ttft_s=0", "greater than 0"]),
        (
            ["--url=http://127.0.0.1:1", "--config.coserving.traffic.trace=gone.csv"],
            ["trace 'gone.csv' is no file", "azure2023_conv_pub"],
        ),
    ],
)
def test_traffic_that_cannot_be_sent_ends_with_one_line(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    command = [sys.executable, "-m", "scripts.traffic_process", CONFIG, f"--out={tmp_path / 'out.jsonl'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_a_run_whose_front_cannot_be_reached_ends_with_the_words_of_its_traffic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "config_arguments", lambda: [CONFIG])
    config = tiny_coserve_run.get_config()
    config.fleet.replicas[1].address = "http://127.0.0.1:1"
    (tmp_path / LOGS).mkdir()
    traffic = OnlineTraffic(config, tmp_path)
    with pytest.raises(TrafficError, match=r"no online traffic for replica shared: .*http://127.0.0.1:1 cannot be reached"):
        traffic.start()
    assert len(traffic.stop()) == 1
    assert traffic.stop() == []


@pytest.fixture
def run_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Like a user's, not like that of the tests with their eight fake devices."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


@pytest.mark.slow
def test_a_run_serves_online_traffic_and_borrows_rollouts_from_its_gaps(tmp_path: Path, run_environment: None) -> None:
    config, run = tiny_coserve_run.get_config(), TrainCommand([CONFIG], tmp_path / "run")
    run.finish()
    told = {name: json.loads((run.workdir / PRIVATE / f"{name}.json").read_text()) for name in ("alone", "shared")}
    assert not any(is_running(each[key]) for each in told.values() for key in ("pid", "engine_pid"))
    rows = [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["phase"] == "train"]
    assert len(rows) == config.num_versions  # transfer.verify compared each version's bits on both replicas
    traffic = read_traffic(run.workdir / TRAFFIC / "shared.jsonl")
    (row,) = json.loads((run.workdir / "coserving.json").read_text())["rows"]
    assert row == coserving_row("shared", traffic, read_metrics(run.workdir / "metrics.jsonl"))
    assert row["num_requests"] > 0
    assert row["num_failed"] == 0, row["errors"]
    assert 0 < row["rollout_tokens"] < row["all_rollout_tokens"]
    assert row["num_rollout_steps"] > 0
    assert row["num_commit_slices"] >= config.num_versions
    report = (run.workdir / "report.md").read_text()
    assert "Online traffic on shared, and what rollouts borrowed" in report
    assert (run.workdir / TRAFFIC / "shared.png").exists()
    assert (run.workdir / LOGS / "shared.traffic.log").read_text() == ""
    assert "were borrowed there" in run.last_output()
