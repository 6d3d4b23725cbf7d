"""When workers fail or die in mid step, whoever asked hears of it with the worker's own text, and nothing is left behind."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_gpu.vllm.environment import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import StepEngine
from common.types import FinishReason
from rose_gpu.vllm import group
from rose_gpu.vllm.direct_update import whole_update
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.group import WorkerGroup
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.worker_weights import CommitError
from tests.conformance.driver import Driver, make_request, prompt
from tests.rose_gpu.vllm.small_models import checkpoint, tensors

SHARED_MEMORY = Path("/dev/shm")
FORMS = ["in process", pytest.param("worker group", marks=pytest.mark.slow)]
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


@pytest.mark.parametrize("form", FORMS)
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


def _in_form(form: str, decode: Callable[[Sequence[int]], str]) -> VllmEngine | WorkerGroup:
    return VllmEngine(options(), decode=decode) if form == "in process" else WorkerGroup(options(), decode=decode)


@pytest.mark.parametrize("form", FORMS)
def test_the_last_token_allowed_may_complete_a_stop_string_or_fail_to_decode(form: str) -> None:
    broken = False

    def decode(token_ids: Sequence[int]) -> str:
        if broken and len(token_ids) == 3:
            raise KeyError("no such token")
        return "".join(f"<{token_id}>" for token_id in token_ids)

    engine = _in_form(form, decode)
    driver = Driver(engine)
    expected = driver.run_alone(make_request("r", prompt(5), max_tokens=3))
    whole = decode(expected.token_ids)
    stopped = driver.run_alone(make_request("r", prompt(5), max_tokens=3, stop_strings=(whole,)))
    assert (stopped.token_ids, stopped.finish_reason) == (expected.token_ids, FinishReason.STOP)
    broken = True
    driver.add(
        make_request("r", prompt(5), max_tokens=3, stop_strings=("never comes",)), make_request("other", prompt(6), max_tokens=3)
    )
    completions = driver.run()
    assert completions["r"].finish_reason is FinishReason.ERROR
    assert "no such token" in str(completions["r"].error)
    assert completions["other"].finish_reason is FinishReason.LENGTH
    engine.close()


@pytest.mark.parametrize("form", FORMS)
def test_a_temperature_that_vllm_does_not_take_is_refused_and_harms_nobody(form: str) -> None:
    engine = _in_form(form, str)
    driver = Driver(engine)
    driver.add(make_request("good", prompt(5)))
    with pytest.raises(RequestRejectedError, match=r"temperature=2\.5: vLLM takes at most 2\.0"):
        engine.add(make_request("hot", prompt(5), temperature=2.5))
    assert driver.run()["good"].finish_reason is FinishReason.LENGTH
    engine.close()


def test_a_version_that_is_not_finite_leaves_nothing_behind_in_the_cache() -> None:
    engine = VllmEngine(options())
    driver = Driver(engine)
    requests = [make_request(f"r{idx}", prompt(20 + idx, idx), trajectory_id=idx) for idx in range(4)]
    driver.add(*requests)
    expected = dict(driver.run())
    weights = tensors(0)
    engine.commit(whole_update({name: np.full_like(tensor, np.nan) for name, tensor in weights.items()}, version=1), version=1)
    driver.add(*[make_request(f"bad{idx}", prompt(30, 9 + idx)) for idx in range(4)])
    bad = driver.run()
    assert all("not finite under weight version 1" in str(bad[f"bad{idx}"].error) for idx in range(4))
    engine.commit(whole_update(weights, version=2), version=2)
    driver.add(*requests, make_request("shares", prompt(30, 9)))
    completions = driver.run()
    for request in requests:
        assert completions[request.request_id].token_ids == expected[request.request_id].token_ids
    assert completions["shares"].finish_reason is FinishReason.LENGTH
    engine.close()


@pytest.mark.slow
def test_a_worker_group_that_hangs_is_closed_although_somebody_waits_for_it(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _group(1)
    monkeypatch.setattr(group, "CLOSE_TIMEOUT_S", 0.5)
    os.kill(engine.pid, signal.SIGSTOP)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(engine.weights.read, "model.norm.weight", np.arange(3, dtype=np.uint64))
        time.sleep(0.2)
        engine.close()
        with pytest.raises(EngineClosedError, match="exit code -9"):
            reading.result(10)


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
