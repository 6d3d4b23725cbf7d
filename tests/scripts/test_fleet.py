"""Replica processes of a run: the command of each, and whole runs that survive their ends and take them along at their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, ReplicaConfig, validate
from common.metrics import read_metrics
from common.rollout.evaluate import numbers_in
from common.transfer.errors import AuthenticationError
from common.transfer.secrets import read_secret
from common.transfer.store.http_client import HttpStore
from common.transfer.store.memory import MemoryStore
from configs import qwen3_8b_mixed
from scripts import entry
from scripts.check_fleet import Kill, judge
from scripts.fleet import LOGS, PRIVATE, open_fleet
from scripts.killed_runs import LOG_FILE, TrainCommand
from tests.common.rollout.test_fleet import is_running
from tests.scripts import tiny_fleet_run

DEADLINE_S = 300


@pytest.fixture
def config_arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    arguments = ["--config=configs/mixed_cpu.py", "--config.seed=3"]
    monkeypatch.setattr(entry, "config_arguments", lambda: arguments)
    return arguments


def fleet_config() -> Config:
    config = Config()
    config.fleet.replicas += [
        ReplicaConfig(name="first"),
        ReplicaConfig(name="second", backend="vllm", tensor_parallel=4),
    ]
    config.fleet.replicas[1].environment["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
    validate(config)
    return config


def commands(fleet: Any) -> list[list[str]]:
    return [member.origin._command for member in fleet._members]


def test_each_replica_gets_the_runs_configuration_its_backend_and_the_learners_store(
    tmp_path: Path, config_arguments: list[str]
) -> None:
    with contextlib.ExitStack() as stack:
        fleet = open_fleet(fleet_config(), tmp_path, MemoryStore(), stack)
        first, second = commands(fleet)
        environments = [member.origin._environment for member in fleet._members]
        for command, name in ((first, "first"), (second, "second")):
            assert set(config_arguments) < set(command)
            assert {f"--replica_id={name}", "--port=0", f"--owner_pid={os.getpid()}"} < set(command)
        assert {"--backend=jetstream", "--config.sampler.tensor_parallel=1"} < set(first)
        assert {"--backend=vllm", "--config.sampler.tensor_parallel=4"} < set(second)
        assert [each.get("CUDA_VISIBLE_DEVICES") for each in environments] == [os.environ.get("CUDA_VISIBLE_DEVICES"), "0,1,2,3"]
        flags_given = dict(argument[2:].partition("=")[::2] for argument in first if argument.startswith("--"))
        for member in fleet._members:  # what we send is what the processes read
            address = member.origin._connect("http://127.0.0.1:1")._address
            assert read_secret(flags_given["rollout_token"]) == address.rollout_token
            assert read_secret(flags_given["control_token"]) == address.control_token
        store = HttpStore(flags_given["store"], token=read_secret(flags_given["store_token"]), timeout_s=10)
        assert store.catalog().entries == ()
        with pytest.raises(AuthenticationError):
            HttpStore(flags_given["store"], token=None, timeout_s=10).catalog()


def test_no_secret_stands_in_a_command_or_can_be_read_by_others(tmp_path: Path, config_arguments: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        fleet = open_fleet(fleet_config(), tmp_path, MemoryStore(), stack)
        tokens = [path for path in (tmp_path / PRIVATE).iterdir() if path.name.endswith("_token")]
        assert len(tokens) == 3
        assert all(path.stat().st_mode & 0o077 == 0 for path in [*tokens, tmp_path / PRIVATE])
        values = {path.read_text() for path in tokens}
        assert len(values) == 3
        assert not any(value in argument for value in values for command in commands(fleet) for argument in command)


def test_the_configurations_of_large_runs_attach_to_their_replicas(tmp_path: Path, config_arguments: list[str]) -> None:
    config = qwen3_8b_mixed.get_config()
    for name in ("rollout_token", "control_token", "store_token"):
        path = tmp_path / name
        path.write_text(f"{name}-of-this-test")
        path.chmod(0o600)
        setattr(config.fleet, name, f"file:{path}")
    config.fleet.store_host, config.fleet.store_port = "127.0.0.1", 0
    config.fleet.ca = config.fleet.store_certificate = config.fleet.store_key = None
    validate(config)
    with contextlib.ExitStack() as stack:
        fleet = open_fleet(config, tmp_path, MemoryStore(), stack)
        origins = [(member.name, member.origin._url) for member in fleet._members]
    assert origins == [(f"tpu{idx}", f"https://rose-replicas:{8000 + idx}") for idx in range(4)] + [
        (f"gpu{idx}", f"https://rose-gpus:{8000 + idx}") for idx in range(2)
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": ""}, "name='' must be"),
        ({"name": "second"}, "given to two replicas"),
        ({"backend": "sglang"}, "backend='sglang' is unknown"),
        ({"tensor_parallel": 2}, "needs backend='vllm'"),
        ({"address": "127.0.0.1:80"}, "write http://HOST:PORT"),
        ({"address": "http://127.0.0.1:80"}, "needs fleet.rollout_token"),
    ],
)
def test_a_replica_that_cannot_be_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    config = fleet_config()
    for name, value in change.items():
        setattr(config.fleet.replicas[0], name, value)
    with pytest.raises(ValueError, match=words):
        validate(config)


@pytest.fixture
def run_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Like a user's, not like that of the tests with their eight fake devices."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


ARGUMENTS = ["--config=tests/scripts/tiny_fleet_run.py"]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["front", "engine"])
def test_a_run_whose_replica_is_killed_trains_every_trajectory_once(tmp_path: Path, run_environment: None, part: str) -> None:
    config, run = tiny_fleet_run.get_config(), TrainCommand(ARGUMENTS, tmp_path / "run")
    kill = Kill(replica="left", part=part, after_version=2, share=0.3)
    kill.carry_out(run)
    row = judge(config, run.workdir, kill, least=None)
    assert (row["versions"], row["missing"], row["twice"], row["lost"]) == (config.num_versions, 0, 0, 1)
    assert {path.name for path in (run.workdir / LOGS).iterdir()} == {"fleet.log", "left.log", "right.log"}
    assert "Who sampled" in (run.workdir / "report.md").read_text()


@pytest.mark.slow
def test_replicas_end_with_a_trainer_that_is_killed_and_the_same_command_goes_on(tmp_path: Path, run_environment: None) -> None:
    run = TrainCommand(ARGUMENTS, tmp_path / "run")
    process = run.start()
    deadline_s = time.monotonic() + DEADLINE_S
    while not any(row["phase"] == "train" and int(row["step"]) >= 3 for row in read_metrics(run.workdir / "metrics.jsonl")):
        assert process.poll() is None, run.last_output()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    told = [json.loads((run.workdir / PRIVATE / f"{name}.json").read_text()) for name in ("left", "right")]
    process.send_signal(signal.SIGKILL)
    process.wait()
    pids = [int(each[key]) for each in told for key in ("pid", "engine_pid")]
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    run.finish()
    rows = [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["phase"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert sorted(number for row in rows for number in numbers_in(str(row["trajectories"]))) == list(range(6 * 2 * 4))


@pytest.mark.slow
def test_a_replica_that_cannot_start_ends_the_run_with_its_own_words(tmp_path: Path, run_environment: None) -> None:
    run = TrainCommand([*ARGUMENTS, "--config.fleet.replicas[1].environment.JAX_PLATFORMS=abacus"], tmp_path / "run")
    status = run.start().wait()
    printed = (run.workdir / LOG_FILE).read_text()
    assert status == 1
    assert "replica right" in printed
    assert "abacus" in printed
