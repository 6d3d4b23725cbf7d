"""What a request gives depends on the request and the weights alone: not on batch mates, slots, order or limits."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from common.serving.engine import StepLimits
from common.types import Completion, Request
from tests.conformance.driver import Driver, make_request, plain, prompt
from tests.conformance.registry import MAX_SLOTS, EngineCase, Feature


def assert_same(got: Completion, expected: Completion, case: EngineCase) -> None:
    assert got.token_ids == expected.token_ids
    assert got.finish_reason == expected.finish_reason
    np.testing.assert_allclose(got.behavior_logprobs, expected.behavior_logprobs, rtol=0, atol=case.logprob_atol)


def mixed_requests(num_requests: int, *, temperature: float = 1.0) -> list[Request]:
    return [
        make_request(
            f"r{idx}", prompt(1 + 5 * idx % 23, idx), trajectory_id=idx, max_tokens=1 + 3 * idx % 11, temperature=temperature
        )
        for idx in range(num_requests)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_more_requests_than_slots_give_what_each_gives_alone(engine_case: EngineCase, driver: Driver, temperature: float) -> None:
    requests = mixed_requests(3 * MAX_SLOTS, temperature=temperature)
    alone = [driver.run_alone(request) for request in requests]
    driver.add(*requests)
    together = driver.run()
    for request, expected in zip(requests, alone, strict=True):
        assert_same(together[request.request_id], expected, engine_case)


def test_order_of_arrival_does_not_matter(engine_case: EngineCase, driver: Driver) -> None:
    requests = mixed_requests(2 * MAX_SLOTS)
    driver.add(*requests)
    first = dict(driver.run())
    driver.add(*reversed(requests))
    second = driver.run()
    for request_id, completion in first.items():
        assert_same(second[request_id], completion, engine_case)


def test_a_request_that_joins_in_mid_run_changes_nobody(engine_case: EngineCase, driver: Driver) -> None:
    early, late = make_request("early", prompt(9), max_tokens=12), make_request("late", prompt(13, 1), trajectory_id=1)
    alone = [driver.run_alone(early), driver.run_alone(late)]
    driver.add(early)
    driver.step_until_tokens("early", 3)
    driver.add(late)
    together = driver.run()
    assert_same(together["early"], alone[0], engine_case)
    assert_same(together["late"], alone[1], engine_case)


def test_decoding_requests_share_steps(driver: Driver) -> None:
    driver.add(*[make_request(f"r{idx}", prompt(4, idx), trajectory_id=idx, max_tokens=10) for idx in range(MAX_SLOTS)])
    driver.run()
    assert max(len(plan.decode) for plan in driver.plans) == MAX_SLOTS
    assert len(driver.plans) < MAX_SLOTS * 10


def test_never_more_running_requests_than_slots(driver: Driver) -> None:
    driver.add(*mixed_requests(3 * MAX_SLOTS))
    while driver.live:
        driver.step()
        assert driver.engine.load().running_requests <= MAX_SLOTS


def test_limits_that_change_from_step_to_step_change_no_token(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.CHUNKED_PREFILL)
    requests = mixed_requests(2 * MAX_SLOTS)
    driver.add(*requests)
    free = dict(driver.run())
    driver.add(*requests)
    for max_tokens in itertools.cycle((1, 7, 2, 16, 3)):
        if not driver.live:
            break
        driver.step(max_tokens)  # checks plan.num_tokens <= max_tokens
    for request_id, completion in free.items():
        assert_same(driver.completions[request_id], completion, engine_case)


def test_a_limit_of_one_token_still_ends_every_request(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.CHUNKED_PREFILL)
    driver.add(*mixed_requests(MAX_SLOTS + 1))
    driver.run(max_tokens=1)


def test_a_step_mixes_prefill_and_decode(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.PREFILL_WITH_DECODE)
    driver.add(make_request("first", prompt(4), max_tokens=10))
    driver.step_until_tokens("first", 2)
    driver.add(make_request("second", prompt(4, 1), trajectory_id=1))
    driver.step()
    assert driver.plans[-1].prefill
    assert driver.plans[-1].decode


def test_planning_twice_plans_the_same(driver: Driver) -> None:
    driver.add(*mixed_requests(MAX_SLOTS + 2))
    while driver.live:
        driver.step(64)
        again = [driver.engine.plan(StepLimits(max_tokens=max_tokens)) for max_tokens in (64, 33, 64)]
        assert again[0] is None or plain(again[0]) == plain(again[2])


def test_equal_keys_draw_equal_tokens_and_other_keys_others(driver: Driver) -> None:
    base = make_request("base", prompt(5), max_tokens=16)
    expected = driver.run_alone(base).token_ids
    assert driver.run_alone(base).token_ids == expected
    for change in ({"run_seed": 8}, {"trajectory_id": 1}, {"turn_idx": 1}):
        other = dataclasses.replace(base, key=dataclasses.replace(base.key, **change))
        assert driver.run_alone(other).token_ids != expected, change


def test_draws_follow_the_log_probabilities(driver: Driver) -> None:
    num_draws = 400
    driver.add(*[make_request(f"r{idx}", prompt(3), trajectory_id=idx, max_tokens=1) for idx in range(num_draws)])
    completions = driver.run().values()
    logprobs = {completion.token_ids[0]: completion.behavior_logprobs[0] for completion in completions}
    counts = dict.fromkeys(logprobs, 0)
    for completion in completions:
        counts[completion.token_ids[0]] += 1
    for token_id, logprob in logprobs.items():
        share = np.exp(logprob)
        spread = np.sqrt(num_draws * share * (1 - share))
        assert abs(counts[token_id] - num_draws * share) <= 5 * spread + 1, token_id
    assert 0.5 < sum(np.exp(list(logprobs.values()))) < 1.0 + 1e-4


def test_greedy_decoding_takes_the_most_probable_token(driver: Driver) -> None:
    greedy = driver.run_alone(make_request("greedy", prompt(3), max_tokens=1, temperature=0.0))
    driver.add(*[make_request(f"r{idx}", prompt(3), trajectory_id=idx, max_tokens=1) for idx in range(100)])
    seen = {completion.token_ids[0]: completion.behavior_logprobs[0] for completion in driver.run().values()}
    assert seen[greedy.token_ids[0]] == pytest.approx(greedy.behavior_logprobs[0], abs=1e-4)
    assert max(seen, key=lambda token_id: seen[token_id]) == greedy.token_ids[0]


def test_truncated_sampling_keeps_the_log_probabilities_of_the_whole_distribution(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.TRUNCATED_SAMPLING)
    greedy = driver.run_alone(make_request("greedy", prompt(3), max_tokens=6, temperature=0.0))
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        cut = driver.run_alone(make_request("cut", prompt(3), max_tokens=6, **options))
        assert cut.token_ids == greedy.token_ids, options
        np.testing.assert_allclose(cut.behavior_logprobs, greedy.behavior_logprobs, rtol=0, atol=1e-4 + engine_case.logprob_atol)


def test_top_k_draws_only_the_k_most_probable_tokens(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.TRUNCATED_SAMPLING, Feature.TOP_LOGPROBS)
    requests = [
        make_request(f"r{idx}", prompt(3), trajectory_id=idx, max_tokens=1, top_k=3, num_top_logprobs=3) for idx in range(60)
    ]
    driver.add(*requests)
    drawn = set()
    for completion in driver.run().values():
        best = {token_id for token_id, _ in completion.top_logprobs[0]}
        assert completion.token_ids[0] in best
        drawn.add(completion.token_ids[0])
    assert len(drawn) > 1


def test_top_log_probabilities_are_sorted_and_agree_with_the_sampled_one(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.TOP_LOGPROBS)
    vocab_size = driver.engine.info.vocab_size
    completion = driver.run_alone(make_request("top", prompt(3), max_tokens=5, num_top_logprobs=vocab_size))
    assert len(completion.top_logprobs) == 5
    for token_id, logprob, top in zip(completion.token_ids, completion.behavior_logprobs, completion.top_logprobs, strict=True):
        values = [value for _, value in top]
        assert values == sorted(values, reverse=True)
        assert sum(np.exp(values)) == pytest.approx(1.0, abs=1e-4)
        assert dict(top)[token_id] == pytest.approx(logprob, abs=1e-5)
