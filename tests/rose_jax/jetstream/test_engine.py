"""The engine against a full forward pass, and the life of requests in it."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import StepLimits
from common.types import Completion, FinishReason, Request
from tests.rose_jax.jetstream.serving_data import (
    SMALL,
    VOCAB_SIZE,
    check_against_forward,
    finish,
    forward_logprobs,
    letters,
    make_engine,
    make_request,
    prompt,
    serve,
    step,
)


@pytest.mark.parametrize("max_tokens_per_step", [3, 16, 1024])
def test_logprobs_and_greedy_tokens_equal_a_full_forward_pass(max_tokens_per_step: int) -> None:
    engine = make_engine()
    requests = [
        make_request(
            f"r{idx}",
            prompt(1 + 7 * idx, seed=idx),
            trajectory_id=idx,
            max_tokens=3 + idx,
            temperature=(0.0, 1.0, 0.7)[idx % 3],
        )
        for idx in range(7)
    ]
    completions = serve(engine, requests, StepLimits(max_tokens=max_tokens_per_step))
    for request in requests:
        completion = completions[request.request_id]
        assert completion.finish_reason is FinishReason.LENGTH
        assert len(completion.token_ids) == request.sampling.max_tokens
        check_against_forward(request, completion)


@pytest.mark.parametrize("first_chunk", range(30, 36))
def test_a_prompt_may_be_cut_anywhere_around_the_end_of_a_context_bucket(first_chunk: int) -> None:
    engine = make_engine(dataclasses.replace(SMALL, context_buckets=(32, 64)))
    request = make_request(prompt_token_ids=prompt(50), temperature=0.0)
    engine.add(request)
    step(engine, StepLimits(max_tokens=first_chunk))
    check_against_forward(request, finish(engine)["a"])


def test_a_draw_depends_on_key_and_position_only() -> None:
    request = make_request("a", trajectory_id=5)
    alone = serve(make_engine(), [request])["a"]
    others = [make_request(f"o{idx}", prompt(9, seed=idx), trajectory_id=idx) for idx in range(6)]
    crowded = serve(make_engine(), [*others, request], StepLimits(max_tokens=7))["a"]
    assert crowded.token_ids == alone.token_ids
    assert serve(make_engine(), [make_request("a", trajectory_id=6)])["a"].token_ids != alone.token_ids


def test_stop_tokens_and_stop_strings_end_a_request_with_the_token_that_completed_them() -> None:
    engine = make_engine()
    free = serve(engine, [make_request(max_tokens=12)])["a"].token_ids
    stop_at = next(idx for idx in range(1, 12) if free[idx] not in free[:idx])
    by_token = serve(engine, [make_request(max_tokens=12, stop_token_ids=(free[stop_at],))])["a"]
    assert by_token.token_ids == free[: stop_at + 1]
    assert by_token.finish_reason is FinishReason.STOP
    text = letters(free[stop_at - 1 : stop_at + 1])
    by_string = serve(engine, [make_request(max_tokens=12, stop_strings=("not there", text))])["a"]
    assert by_string.finish_reason is FinishReason.STOP
    assert letters(by_string.token_ids).endswith(text)


def test_a_detokenizer_that_fails_ends_only_the_request_that_needed_it() -> None:
    engine = make_engine()
    engine._decode = lambda _: (_ for _ in ()).throw(ValueError("half a character"))
    completions = serve(engine, [make_request("a", stop_strings=("x",)), make_request("b")])
    assert completions["a"].finish_reason is FinishReason.ERROR
    assert "half a character" in (completions["a"].error or "")
    assert completions["b"].finish_reason is FinishReason.LENGTH


def test_top_logprobs_are_the_best_of_the_distribution() -> None:
    request = make_request(num_top_logprobs=3, temperature=0.8)
    completion = serve(make_engine(), [request, make_request("b", num_top_logprobs=0)])["a"]
    expected = forward_logprobs(request.prompt_token_ids + completion.token_ids, temperature=0.8)[10:-1]
    assert len(completion.top_logprobs) == len(completion.token_ids)
    for pairs, row in zip(completion.top_logprobs, expected, strict=True):
        assert [token_id for token_id, _ in pairs] == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose([value for _, value in pairs], np.sort(row)[::-1][:3], atol=1e-4)


def test_top_k_one_is_greedy_and_cuts_leave_the_logprob_uncut() -> None:
    engine = make_engine()
    greedy = serve(engine, [make_request(temperature=0.0)])["a"]
    cut = make_request(temperature=1.0, top_k=1)
    completion = serve(engine, [cut])["a"]
    assert completion.token_ids == greedy.token_ids
    check_against_forward(cut, completion)


def test_an_option_of_one_request_does_not_change_the_draws_of_another() -> None:
    plain = serve(make_engine(), [make_request("a", trajectory_id=3)])["a"]
    mixed = serve(make_engine(), [make_request("a", trajectory_id=3), make_request("b", top_p=0.5, num_top_logprobs=2)])
    assert mixed["a"].token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (make_request(prompt_token_ids=()), "empty"),
        (make_request(prompt_token_ids=(1, VOCAB_SIZE)), "outside the vocabulary"),
        (make_request(prompt_token_ids=prompt(60), max_tokens=5), "exceed the context"),
        (make_request(num_top_logprobs=9), "num_top_logprobs=9"),
        (make_request(temperature=-1.0), "temperature"),
        (make_request(temperature=1e-30), "temperature=1e-30"),
    ],
)
def test_a_request_that_can_never_run_is_refused_alone(request_: Request, words: str) -> None:
    engine = make_engine()
    engine.add(make_request("good"))
    with pytest.raises(RequestRejectedError, match=words):
        engine.add(request_)
    assert finish(engine).keys() == {"good"}


def test_an_id_in_use_is_refused_and_may_be_used_again_afterwards() -> None:
    engine = make_engine()
    engine.add(make_request("a"))
    with pytest.raises(RequestRejectedError, match="in use"):
        engine.add(make_request("a"))
    finish(engine)
    assert serve(engine, [make_request("a")]).keys() == {"a"}


def test_an_id_is_in_use_until_its_completion_was_collected() -> None:
    engine = make_engine()
    engine.add(make_request("a"))
    engine.abort("a")
    with pytest.raises(RequestRejectedError, match="in use until"):
        engine.add(make_request("a"))
    assert engine.drain() is not None
    assert serve(engine, [make_request("a")])["a"].finish_reason is FinishReason.LENGTH


def test_stop_tokens_outside_the_vocabulary_are_never_met() -> None:
    engine = make_engine()
    free = serve(engine, [make_request()])["a"].token_ids
    odd = (-1, VOCAB_SIZE, 2**40)
    assert serve(engine, [make_request(stop_token_ids=odd)])["a"].token_ids == free
    ahead = StepLimits(max_tokens=99, tokens_per_sequence=8)
    stopped = serve(engine, [make_request(stop_token_ids=(*odd, free[0]))], ahead)
    assert stopped["a"].token_ids == free[:1]


def test_abort_returns_the_tokens_so_far_whether_running_waiting_planned_or_in_flight() -> None:
    engine = make_engine(dataclasses.replace(SMALL, max_slots=2, pages_per_chunk=SMALL.chunk_pages))
    for name in ("running", "planned", "waiting"):
        engine.add(make_request(name, max_tokens=20))
    for _ in range(3):
        step(engine)
    engine.abort("waiting")
    engine.abort("unknown")
    plan = engine.plan(StepLimits(max_tokens=100))
    assert plan is not None
    engine.abort("planned")
    engine.submit(plan)
    engine.abort("running")
    engine.abort("running")
    result = engine.collect()
    assert result.tokens == ()
    ends = {completion.request_id: completion for completion in result.completions}
    assert {name: len(end.token_ids) for name, end in ends.items()} == {"running": 3, "planned": 3, "waiting": 0}
    assert all(end.finish_reason is FinishReason.ABORTED for end in ends.values())
    assert engine.drain() is None
    assert engine.plan(StepLimits(max_tokens=100)) is None


def test_an_abort_with_nothing_else_to_do_is_reported_by_an_empty_step_or_by_drain() -> None:
    engine = make_engine()
    engine.add(make_request("a"))
    engine.abort("a")
    assert finish(engine)["a"].finish_reason is FinishReason.ABORTED
    engine.add(make_request("b"))
    engine.abort("b")
    result = engine.drain()
    assert result is not None
    assert [completion.request_id for completion in result.completions] == ["b"]


def test_a_device_failure_ends_the_step_s_requests_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(dataclasses.replace(SMALL, max_slots=2, pages_per_chunk=SMALL.chunk_pages))
    requests = [make_request(f"r{idx}", prompt(20, seed=idx), trajectory_id=idx) for idx in range(3)]
    for request in requests:
        engine.add(request)
    step(engine)
    engine.preempt("r1", keep_cache=True)
    run = engine._runner.run

    def broken(_: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(engine._runner, "run", broken)
    result = step(engine, StepLimits(max_tokens=1))
    assert result is not None
    failed = {completion.request_id: completion for completion in result.completions}
    assert failed.keys() == {"r0"}
    assert "out of memory" in (failed["r0"].error or "")
    assert len(failed["r0"].token_ids) == 1
    monkeypatch.setattr(engine._runner, "run", run)
    rest = finish(engine)
    assert rest.keys() == {"r1", "r2"}
    for request in requests[1:]:
        check_against_forward(request, rest[request.request_id])


def test_planning_again_gives_the_same_plan_and_an_old_plan_is_refused() -> None:
    engine = make_engine()
    for idx in range(6):
        engine.add(make_request(f"r{idx}", prompt(10), max_tokens=3))
    first = engine.plan(StepLimits(max_tokens=25))
    for _ in range(3):
        again = engine.plan(StepLimits(max_tokens=25))
        assert again is not None
        assert first is not None
        assert (again.prefill, again.decode) == (first.prefill, first.decode)
    with pytest.raises(AssertionError, match="newest plan"):
        engine.submit(first)
    engine.submit(again)
    engine.collect()
    completions: dict[str, Completion] = finish(engine)
    for idx in range(6):
        check_against_forward(make_request(f"r{idx}", prompt(10), max_tokens=3), completions[f"r{idx}"])


def test_a_closed_engine_refuses_everything_and_may_be_closed_again() -> None:
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.add(make_request())
