"""When workers fail or die in mid step, whoever asked hears of it with the worker's own text, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_gpu.vllm.environment import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

from common.errors import EngineClosedError
from common.serving.engine import StepEngine
from common.types import FinishReason
from rose_gpu.vllm.direct_update import whole_update
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.group import WorkerGroup
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.worker_weights import CommitError
from tests.conformance.driver import Driver, make_request, prompt
from tests.rose_gpu.vllm.small_models import checkpoint, tensors

SHARED_MEMORY = Path("/dev/shm")
SLOW_RANKS = pytest.param(2, marks=pytest.mark.slow)


def options(ranks: int = 1) -> VllmOptions:
    return VllmOptions(model_dir=checkpoint(0), max_slots=4, max_context_tokens=64, tensor_parallel=ranks)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No file in shared memory and no child process that was not there before."""
    files, children = _shared_files(), _children()
    yield
    deadline_s = time.monotonic() + 20.0
    while time.monotonic() < deadline_s and (_shared_files() > files or _children() > children):
        time.sleep(0.1)
    assert _shared_files() <= files
    assert _children() <= children


def _shared_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(("rose_update_", "vllm_dist_", "psm_"))}


def _children() -> set[int]:
    """Descendants that run vLLM's workers or a worker group; the spawn machinery's own tracker stays."""
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        pid = waiting.pop()
        try:
            mine = [int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()]
            found |= {child for child in mine if "resource_tracker" not in Path(f"/proc/{child}/cmdline").read_text()}
        except OSError:
            continue  # it has ended meanwhile
        waiting += mine
    return found


def _burn(worker: Any) -> None:
    """Every forward pass of this worker fails from now on."""

    def forward(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"the device of rank {worker.rank} burns")

    worker.model_runner.model.forward = forward


@pytest.mark.parametrize("ranks", [1, SLOW_RANKS])
def test_a_worker_that_fails_in_mid_step_ends_every_request_with_its_text(nothing_left: None, ranks: int) -> None:
    engine = VllmEngine(options(ranks))
    driver = Driver(engine)
    driver.add(*[make_request(f"r{idx}", prompt(5, idx), trajectory_id=idx) for idx in range(6)])
    driver.step()
    engine.call_workers(_burn)
    completions = _run_to_failure(driver)
    assert len(completions) == 6
    for completion in completions.values():
        assert completion.finish_reason is FinishReason.ERROR
        assert "burns" in (completion.error or "")
    with pytest.raises(EngineClosedError, match="burns"):
        engine.add(make_request("late", prompt(3)))
    engine.close()


def _run_to_failure(driver: Driver) -> dict[str, Any]:
    for _ in range(20):
        if not driver.live:
            return driver.completions
        driver.step()
    raise AssertionError(f"{sorted(driver.live)} still wait")


def _group(ranks: int) -> WorkerGroup:
    return WorkerGroup(options(ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_group_killed_in_mid_step_ends_every_request_and_leaves_nothing(nothing_left: None, ranks: int) -> None:
    engine = _group(ranks)
    driver = Driver(engine)
    driver.add(*[make_request(f"r{idx}", prompt(5, idx), trajectory_id=idx) for idx in range(6)])
    driver.step()
    assert driver.submit() is not None
    os.kill(engine.pid, signal.SIGKILL)
    driver.collect()
    completions = _run_to_failure(driver)
    assert all(completion.finish_reason is FinishReason.ERROR for completion in completions.values())
    assert all("exit code -9" in (completion.error or "") for completion in completions.values())
    _refuses(engine)
    engine.close()


@pytest.mark.slow
def test_a_rank_killed_in_mid_step_ends_every_request(nothing_left: None) -> None:
    engine = VllmEngine(options(2))
    driver = Driver(engine)
    driver.add(*[make_request(f"r{idx}", prompt(5, idx), trajectory_id=idx) for idx in range(6)])
    driver.step()
    victim = engine.call_workers(_pid)[1]
    assert driver.submit() is not None
    os.kill(victim, signal.SIGKILL)
    driver.collect()
    completions = _run_to_failure(driver)
    assert all(completion.finish_reason is FinishReason.ERROR for completion in completions.values())
    for completion in completions.values():  # the other rank may end a moment later
        assert "exit codes of worker processes, by rank: {" in str(completion.error)
        assert "1: -9" in str(completion.error)
    _refuses(engine)
    engine.close()


def _pid(worker: Any) -> int:
    return os.getpid()


def _refuses(engine: StepEngine[Any]) -> None:
    with pytest.raises(EngineClosedError, match="make a new one"):
        engine.add(make_request("late", prompt(3)))


@pytest.mark.parametrize("form", ["in process", pytest.param("worker group", marks=pytest.mark.slow)])
def test_an_abort_in_the_middle_of_a_commit_ends_the_request_and_not_the_commit(nothing_left: None, form: str) -> None:
    engine = VllmEngine(options()) if form == "in process" else _group(1)
    driver = Driver(engine)
    driver.add(make_request("stays", prompt(5), max_tokens=10), make_request("goes", prompt(6), trajectory_id=1, max_tokens=10))
    driver.step_until_tokens("goes", 3)
    driver.drain()
    commit = engine.commit_in_slices(whole_update(tensors(1), version=1), version=1, max_slice_bytes=20_000)
    next(commit)
    engine.abort("goes")
    driver.add(make_request("comes", prompt(7), trajectory_id=2, max_tokens=10))
    for _ in commit:
        pass
    completions = driver.run()
    assert completions["goes"].finish_reason is FinishReason.ABORTED
    assert completions["goes"].weight_versions == (0,) * len(completions["goes"].token_ids)
    assert completions["stays"].weight_versions[-1] == 1
    assert completions["comes"].weight_versions == (1,) * 10
    engine.close()


@pytest.mark.slow
def test_a_commit_that_fails_in_a_worker_group_raises_here_with_the_workers_text(nothing_left: None) -> None:
    engine = _group(1)
    driver = Driver(engine)
    expected = driver.run_alone(make_request("r", prompt(5)))
    broken = whole_update(tensors(1), version=1)
    broken.runs[2].bits = broken.runs[2].bits[:-1]
    with pytest.raises((ValueError, CommitError), match="values of uint32, expected"):
        engine.commit(broken, version=1)
    assert engine.load().weight_version == 0
    assert driver.run_alone(make_request("r", prompt(5))) == expected
    engine.commit(whole_update(tensors(1), version=1), version=1)
    assert engine.load().weight_version == 1
    engine.close()
