"""Several tokens for one sequence in one step: the same tokens, fewer steps, limits kept."""

from __future__ import annotations

import dataclasses

import pytest

from common.serving.engine import StepLimits
from common.types import FinishReason, Request
from tests.rose_jax.jetstream.serving_data import SMALL, check_against_forward, make_engine, make_request, prompt, serve, step


def requests_of_all_lengths() -> list[Request]:
    return [
        make_request(
            f"r{idx}", prompt(3 + 8 * idx, seed=idx), trajectory_id=idx, max_tokens=1 + 4 * idx, temperature=float(idx != 2)
        )
        for idx in range(6)
    ]


@pytest.mark.parametrize(("max_tokens", "tokens_per_sequence"), [(1024, 8), (1024, 3), (9, 5)])
def test_running_ahead_changes_no_token(max_tokens: int, tokens_per_sequence: int) -> None:
    requests = requests_of_all_lengths()
    expected = serve(make_engine(), requests)
    completions = serve(make_engine(), requests, StepLimits(max_tokens=max_tokens, tokens_per_sequence=tokens_per_sequence))
    for request in requests:
        completion = completions[request.request_id]
        assert completion.token_ids == expected[request.request_id].token_ids
        assert completion.finish_reason is FinishReason.LENGTH
        check_against_forward(request, completion)


def test_a_decode_of_several_tokens_takes_one_step_and_ends_where_it_stops() -> None:
    engine = make_engine()
    free = serve(engine, [make_request(max_tokens=12)])["a"].token_ids
    stop_at = next(idx for idx in range(2, 12) if free[idx] not in free[:idx])
    engine.add(make_request(max_tokens=20, stop_token_ids=(free[stop_at],)))
    engine.add(make_request("b", prompt(20, seed=5), max_tokens=20))
    step(engine)
    completions, num_steps = {}, 0
    while (plan := engine.plan(StepLimits(max_tokens=100, tokens_per_sequence=20))) is not None:
        assert all(entry.num_tokens <= SMALL.max_step_draws for entry in plan.decode)
        engine.submit(plan)
        completions.update({end.request_id: end for end in engine.collect().completions})
        num_steps += 1
    assert num_steps == 3  # 19 tokens in steps of 8
    assert completions["a"].token_ids == free[: stop_at + 1]
    assert completions["a"].finish_reason is FinishReason.STOP
    check_against_forward(make_request("b", prompt(20, seed=5), max_tokens=20), completions["b"])


@pytest.mark.parametrize(
    "option", [{"top_k": 3}, {"num_top_logprobs": 2}, {"stop_strings": ("zz",)}, {"stop_token_ids": (33, 34, 35, 36, 32)}]
)
def test_requests_that_the_device_cannot_follow_take_one_token_a_step(option: dict) -> None:
    engine = make_engine()
    engine.add(make_request("a", **option))
    engine.add(make_request("b"))
    step(engine)
    plan = engine.plan(StepLimits(max_tokens=100, tokens_per_sequence=8))
    assert plan is not None
    assert {entry.num_tokens for entry in plan.decode} == {1}


def test_pages_computed_ahead_are_shared_like_others() -> None:
    ahead = StepLimits(max_tokens=1024, tokens_per_sequence=8)
    engine = make_engine()
    first = make_request("first", prompt(10), max_tokens=24)
    completion = serve(engine, [first], ahead)["first"]
    second = make_request("second", first.prompt_token_ids + completion.token_ids, max_tokens=4)
    answer = serve(engine, [second], ahead)["second"]
    assert answer.cached_prompt_tokens >= 24
    check_against_forward(second, answer)


def test_invariant_mode_takes_one_token_a_step() -> None:
    engine = make_engine(dataclasses.replace(SMALL, invariant=True))
    engine.add(make_request())
    step(engine)
    plan = engine.plan(StepLimits(max_tokens=100, tokens_per_sequence=8))
    assert plan is not None
    assert [entry.num_tokens for entry in plan.decode] == [1]
