"""Preempted requests keep their tokens and go on as if nothing had happened; priorities decide who runs."""

from __future__ import annotations

import pytest

from common.types import FinishReason
from tests.conformance.driver import Driver, make_request, prompt
from tests.conformance.registry import MAX_SLOTS, EngineCase, Feature
from tests.conformance.test_engine_batching import assert_same


@pytest.mark.parametrize("keep_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_preempted_request_goes_on_from_the_same_state(
    engine_case: EngineCase, driver: Driver, keep_cache: bool, temperature: float
) -> None:
    request = make_request("r", prompt(11), max_tokens=12, temperature=temperature)
    mate = make_request("mate", prompt(6, 1), trajectory_id=1, max_tokens=12, temperature=temperature)
    expected = [driver.run_alone(request), driver.run_alone(mate)]
    driver.add(request, mate)
    for num_tokens in (1, 4, 9):
        driver.step_until_tokens("r", num_tokens)
        driver.engine.preempt("r", keep_cache=keep_cache)
    driver.run()
    assert_same(driver.completions["r"], expected[0], engine_case)
    assert_same(driver.completions["mate"], expected[1], engine_case)


def test_a_request_preempted_in_mid_prefill_goes_on(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.CHUNKED_PREFILL)
    request = make_request("r", prompt(30))
    expected = driver.run_alone(request)
    for keep_cache in (True, False):
        driver.add(request)
        driver.step(max_tokens=13)
        driver.engine.preempt("r", keep_cache=keep_cache)
        assert_same(driver.run(max_tokens=9)["r"], expected, engine_case)


def test_preemption_without_the_cache_frees_it_and_with_it_computes_nothing_again(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.KEEP_CACHE)
    for keep_cache in (True, False):
        driver.add(make_request("r", prompt(20), max_tokens=6))
        driver.step_until_tokens("r", 3)
        used, num_plans = driver.engine.load().used_cache_tokens, len(driver.plans)
        driver.engine.preempt("r", keep_cache=keep_cache)
        load = driver.engine.load()
        assert (load.running_requests, load.waiting_requests) == (0, 1)
        assert load.used_cache_tokens == (used if keep_cache else 0)
        driver.run()
        if keep_cache:
            assert sum(plan.prefill_tokens for plan in driver.plans[num_plans:]) == 0


def test_preempting_unknown_waiting_or_ended_requests_changes_nothing(driver: Driver) -> None:
    driver.add(*[make_request(f"r{idx}", prompt(3, idx), trajectory_id=idx) for idx in range(MAX_SLOTS + 1)])
    driver.engine.preempt("nobody", keep_cache=True)
    driver.engine.preempt("r0", keep_cache=False)
    driver.run()
    driver.engine.preempt("r0", keep_cache=False)
    assert driver.step() is None


def test_abort_of_a_preempted_request_returns_its_tokens(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3), max_tokens=10))
    driver.step_until_tokens("r", 3)
    streamed = [token.token_id for token in driver.streamed["r"]]
    driver.engine.preempt("r", keep_cache=True)
    driver.engine.abort("r")
    completion = driver.run()["r"]
    assert completion.finish_reason is FinishReason.ABORTED
    assert list(completion.token_ids) == streamed
    assert driver.engine.load().used_cache_tokens == 0


def test_a_preempted_request_resumes_before_its_equals(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.RESUME_FIRST)
    driver.add(*[make_request(f"r{idx}", prompt(3, idx), trajectory_id=idx, max_tokens=10) for idx in range(2 * MAX_SLOTS)])
    driver.step_until_tokens(f"r{MAX_SLOTS - 1}", 2)
    num_plans = len(driver.plans)
    for request_id in ("r1", "r0"):
        driver.engine.preempt(request_id, keep_cache=False)
    started: list[str] = []
    while driver.live:
        driver.step()
    for plan in driver.plans[num_plans:]:
        in_slot_order = sorted((*plan.prefill, *plan.decode), key=lambda entry: entry.slot_idx)
        started += [entry.request_id for entry in in_slot_order if entry.request_id not in started]
    first_fresh = min(started.index(f"r{idx}") for idx in range(MAX_SLOTS, 2 * MAX_SLOTS))
    assert max(started.index("r0"), started.index("r1")) < first_fresh


def test_a_waiting_request_of_higher_priority_starts_before_lower_ones(driver: Driver) -> None:
    driver.add(*[make_request(f"low{idx}", prompt(3, idx), trajectory_id=idx, max_tokens=4) for idx in range(3 * MAX_SLOTS)])
    driver.step()
    driver.add(make_request("high", prompt(3, 99), trajectory_id=99, max_tokens=1, priority=5))
    while "high" in driver.live:
        driver.step()
    assert len(driver.completions) <= MAX_SLOTS + 1


def test_a_request_of_higher_priority_takes_a_slot_at_the_next_step(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PRIORITY_PREEMPTION)
    low = [make_request(f"low{idx}", prompt(3, idx), trajectory_id=idx, max_tokens=20) for idx in range(MAX_SLOTS)]
    expected = [driver.run_alone(request) for request in low]
    driver.add(*low)
    driver.step_until_tokens(f"low{MAX_SLOTS - 1}", 2)
    driver.add(make_request("high", prompt(5, 9), trajectory_id=9, max_tokens=3, priority=1))
    driver.step()
    assert len(driver.streamed["high"]) == 1
    driver.run()
    for request, completion in zip(low, expected, strict=True):
        assert_same(driver.completions[request.request_id], completion, engine_case)
