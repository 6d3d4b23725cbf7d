"""What was computed before is not computed again, changes no result, and never outlives weights against the declared policy."""

from __future__ import annotations

import dataclasses

from common.serving.engine import StaleCache
from common.types import Completion, Request
from tests.conformance.driver import Driver, make_request, prompt
from tests.conformance.registry import MAX_SLOTS, EngineCase, Feature
from tests.conformance.test_engine_batching import assert_same

PAGE_TOKENS = 16
"""Reuse may be by pages of up to so many tokens."""


def run_on_new_engine(case: EngineCase, request: Request) -> Completion:
    """What the request gives where nothing was cached."""
    driver = Driver(case.make())
    completion = driver.run_alone(request)
    assert completion.cached_prompt_tokens == 0
    driver.engine.close()
    return completion


def next_turn(first: Request, completion: Completion, observation: tuple[int, ...]) -> Request:
    prompt_token_ids = (*first.prompt_token_ids, *completion.token_ids, *observation)
    key = dataclasses.replace(first.key, turn_idx=first.key.turn_idx + 1)
    return dataclasses.replace(first, prompt_token_ids=prompt_token_ids, key=key)


def prefilled(driver: Driver, request: Request) -> tuple[Completion, int]:
    """The completion of a request alone, and the prompt tokens computed for it."""
    num_plans = len(driver.plans)
    completion = driver.run_alone(request)
    return completion, sum(plan.prefill_tokens for plan in driver.plans[num_plans:])


def test_a_next_turn_computes_only_what_is_new(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    first = make_request("r", prompt(36, salt=21), max_tokens=4)
    second = next_turn(first, driver.run_alone(first), prompt(6, salt=22))
    completion, num_prefilled = prefilled(driver, second)
    assert completion.cached_prompt_tokens >= 36 - PAGE_TOKENS
    assert num_prefilled == len(second.prompt_token_ids) - completion.cached_prompt_tokens
    assert_same(completion, run_on_new_engine(engine_case, second), engine_case)


def test_equal_prompts_of_a_group_share_their_prefix(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    requests = [make_request(f"r{idx}", prompt(40, salt=23), trajectory_id=idx, max_tokens=4) for idx in range(MAX_SLOTS)]
    alone = [run_on_new_engine(engine_case, requests[idx]) for idx in (0, MAX_SLOTS - 1)]
    driver.run_alone(requests[0])
    driver.add(*requests[1:])
    together = driver.run()
    assert all(together[f"r{idx}"].cached_prompt_tokens >= 40 - PAGE_TOKENS for idx in range(1, MAX_SLOTS))
    assert_same(together[f"r{MAX_SLOTS - 1}"], alone[1], engine_case)


def test_a_prefix_is_not_shared_across_namespaces(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    first = make_request("r", prompt(40, salt=24), max_tokens=4)
    driver.run_alone(first)
    other = dataclasses.replace(first, request_id="other", cache_namespace="another tenant")
    completion, num_prefilled = prefilled(driver, other)
    assert completion.cached_prompt_tokens == 0
    assert num_prefilled == len(other.prompt_token_ids)


def test_equal_prompts_that_start_in_one_step_give_what_each_gives_alone(engine_case: EngineCase, driver: Driver) -> None:
    base = prompt(36, salt=31)
    requests = [
        make_request(f"r{idx}", (*base, *prompt(idx + 1, salt=32 + idx)), trajectory_id=idx, max_tokens=4)
        for idx in range(MAX_SLOTS)
    ]
    driver.add(*requests)
    together = dict(driver.run())
    for request in requests:
        assert_same(together[request.request_id], driver.run_alone(request), engine_case)


def test_a_prefix_is_shared_only_as_far_as_the_tokens_agree(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    base = prompt(40, salt=24)
    driver.run_alone(make_request("base", base, max_tokens=2))
    for differs_at in (0, 1, 20, 39):
        changed = (*base[:differs_at], 25, *base[differs_at + 1 :])
        request = make_request("changed", changed, max_tokens=6)
        completion = driver.run_alone(request)
        assert completion.cached_prompt_tokens <= differs_at
        assert_same(completion, run_on_new_engine(engine_case, request), engine_case)


def test_the_whole_prompt_cached_still_samples(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    request = make_request("r", prompt(32, salt=26), max_tokens=5)
    expected = run_on_new_engine(engine_case, request)
    for _ in range(3):
        assert_same(driver.run_alone(request), expected, engine_case)


def test_cached_state_of_older_weights_is_used_only_where_declared(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    request = make_request("r", prompt(40, salt=27), max_tokens=8)
    driver.run_alone(request)
    driver.drain()
    driver.engine.commit(engine_case.weights(1), version=1)
    completion = driver.run_alone(request)
    if engine_case.stale_cache is StaleCache.KEEP:
        assert completion.cached_prompt_tokens >= 40 - PAGE_TOKENS
        return
    assert completion.cached_prompt_tokens == 0
    fresh = Driver(engine_case.make())
    fresh.engine.commit(engine_case.weights(1), version=1)
    assert_same(completion, fresh.run_alone(request), engine_case)
    fresh.engine.close()


def test_what_a_request_computed_across_a_commit_is_reused_only_where_declared(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    first = make_request("r", prompt(36, salt=28), max_tokens=10)
    driver.add(first)
    driver.step_until_tokens("r", 4)
    driver.drain()
    driver.engine.commit(engine_case.weights(1), version=1)
    second = dataclasses.replace(next_turn(first, driver.run()["r"], prompt(4, salt=29)), request_id="second")
    completion = driver.run_alone(second)
    if engine_case.stale_cache is StaleCache.KEEP:
        assert completion.cached_prompt_tokens >= 36 - PAGE_TOKENS
    else:
        fresh = Driver(engine_case.make())
        fresh.engine.commit(engine_case.weights(1), version=1)
        assert_same(completion, fresh.run_alone(second), engine_case)
        fresh.engine.close()


def test_prefixes_give_way_to_requests(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFIX_REUSE)
    for idx in range(12):
        driver.run_alone(make_request("r", prompt(50, salt=30 + idx), max_tokens=4))
        load = driver.engine.load()
        assert load.used_cache_tokens == 0
        assert 0 <= load.reclaimable_cache_tokens <= load.capacity_cache_tokens
    driver.add(*[make_request(f"r{idx}", prompt(40, salt=50 + idx), max_tokens=20) for idx in range(2 * MAX_SLOTS)])
    driver.run()
