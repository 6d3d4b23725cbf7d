"""A commit swaps the weights whole, between two steps, and every token says which version it was sampled under."""

from __future__ import annotations

import pytest

from common.errors import RoseError
from common.serving.engine import StaleCache
from tests.conformance.driver import Driver, make_request, prompt
from tests.conformance.registry import EngineCase
from tests.conformance.test_engine_batching import assert_same


def commit(driver: Driver, case: EngineCase, *, seed: int, version: int) -> None:
    driver.drain()
    driver.engine.commit(case.weights(seed), version=version)


def test_the_first_version_is_the_one_the_engine_was_built_with(driver: Driver) -> None:
    assert driver.engine.load().weight_version == 0
    assert set(driver.run_alone(make_request("r", prompt(3))).weight_versions) == {0}


def test_a_commit_in_mid_request_tags_the_tokens_on_both_sides(engine_case: EngineCase, driver: Driver) -> None:
    request = make_request("r", prompt(5), max_tokens=16)
    old = driver.run_alone(request)
    driver.add(request)
    driver.step_until_tokens("r", 6)
    commit(driver, engine_case, seed=1, version=3)
    num_old = len(driver.streamed["r"])
    completion = driver.run()["r"]
    assert driver.engine.load().weight_version == 3
    assert completion.weight_versions == (0,) * num_old + (3,) * (16 - num_old)
    assert completion.token_ids[:num_old] == old.token_ids[:num_old]
    assert completion.behavior_logprobs[num_old:] != old.behavior_logprobs[num_old:]


def test_after_a_commit_a_request_gives_what_a_new_engine_with_those_weights_gives(engine_case: EngineCase, driver: Driver) -> None:
    request = make_request("r", prompt(5), max_tokens=12)  # shorter than a page: no prefix of the old version is reused
    old = driver.run_alone(request)
    commit(driver, engine_case, seed=1, version=1)
    changed = driver.run_alone(request)
    assert changed.behavior_logprobs != old.behavior_logprobs
    commit(driver, engine_case, seed=0, version=2)
    again = driver.run_alone(request)
    assert_same(again, old, engine_case)
    assert set(again.weight_versions) == {2}


def test_a_failed_commit_leaves_the_old_version_whole(engine_case: EngineCase, driver: Driver) -> None:
    request = make_request("r", prompt(5), max_tokens=12)
    expected = driver.run_alone(request)
    driver.add(request)
    driver.step_until_tokens("r", 4)
    driver.drain()
    wrong = engine_case.wrong_weights()
    assert wrong
    for fault, weights in wrong.items():
        with pytest.raises((ValueError, RoseError)):
            driver.engine.commit(weights, version=9)
        assert driver.engine.load().weight_version == 0, fault
    completion = driver.run()["r"]
    assert_same(completion, expected, engine_case)
    assert set(completion.weight_versions) == {0}
    assert_same(driver.run_alone(request), expected, engine_case)


def test_a_commit_keeps_waiting_and_preempted_requests(engine_case: EngineCase, driver: Driver) -> None:
    requests = [make_request(f"r{idx}", prompt(3, idx), trajectory_id=idx, max_tokens=8) for idx in range(7)]
    driver.add(*requests)
    driver.step_until_tokens("r0", 3)
    driver.engine.preempt("r0", keep_cache=True)
    commit(driver, engine_case, seed=1, version=1)
    completions = driver.run()
    assert all(len(completion.token_ids) == 8 for completion in completions.values())
    assert set(completions["r6"].weight_versions) == {1}
    assert completions["r0"].weight_versions == (0,) * 3 + (1,) * 5


def test_dropping_stale_caches_resets_the_requests_that_point_at_them(engine_case: EngineCase, driver: Driver) -> None:
    """Paused and running requests alike: what they sample next is what a new engine samples after the same tokens."""
    if engine_case.stale_cache is not StaleCache.DROP:
        pytest.skip(f"stale_cache={engine_case.stale_cache.value}: requests keep their caches, as declared")
    requests = [make_request(name, prompt(34, salt), max_tokens=10, temperature=0.0) for salt, name in enumerate(("runs", "waits"))]
    driver.add(*requests)
    driver.step_until_tokens("waits", 4)
    driver.engine.preempt("waits", keep_cache=True)
    commit(driver, engine_case, seed=1, version=1)
    assert driver.engine.load().used_cache_tokens == 0
    completions = dict(driver.run())
    fresh = Driver(engine_case.make())
    commit(fresh, engine_case, seed=1, version=1)
    for request in requests:
        completion = completions[request.request_id]
        num_old = completion.weight_versions.count(0)
        assert 0 < num_old < 10
        begun = (*request.prompt_token_ids, *completion.token_ids[:num_old])
        rest = fresh.run_alone(make_request("rest", begun, max_tokens=10 - num_old, temperature=0.0))
        assert completion.token_ids[num_old:] == rest.token_ids
        assert completion.behavior_logprobs[num_old:] == pytest.approx(
            rest.behavior_logprobs, abs=max(engine_case.logprob_atol, 1e-9)
        )
    fresh.engine.close()
