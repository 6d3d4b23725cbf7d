"""Prefix reuse, page pressure, priorities, preemption, chunks of the cache and what a commit does to it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from common.serving.engine import StaleCache, StepLimits
from common.types import Completion, FinishReason, Request
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.jetstream.runner import StepRunner
from rose_jax.jetstream.step_inputs import StepInputs
from tests.rose_jax.jetstream.serving_data import (
    MAX_CONTEXT,
    MODEL,
    PLENTY,
    SMALL,
    check_against_forward,
    finish,
    make_engine,
    make_request,
    params,
    prompt,
    serve,
    step,
)


def make_tight_engine(max_slots: int = SMALL.max_slots) -> JetStreamEngine:
    """An engine with pages for one full request and two more: the others are taken. Same shapes, so the same programs."""
    engine = make_engine(dataclasses.replace(SMALL, max_slots=max_slots, pages_per_chunk=SMALL.chunk_pages))
    pool = engine._scheduler.pools[0]
    assert pool.allocate(pool.num_pages - SMALL.pages_per_context - 2) is not None
    return engine


def check_all(requests: list[Request], completions: dict[str, Completion], *, seed: int = 0) -> None:
    assert completions.keys() == {request.request_id for request in requests}
    for request in requests:
        completion = completions[request.request_id]
        assert completion.finish_reason is FinishReason.LENGTH
        check_against_forward(request, completion, seed=seed)


def pages_are_whole(engine: JetStreamEngine) -> None:
    for pool in engine._scheduler.pools:
        pool.check()
    assert engine.load().used_cache_tokens == 0


def test_the_next_turn_prefills_only_what_is_new() -> None:
    engine = make_engine()
    first = make_request("turn0", prompt(20), max_tokens=8)
    completion = serve(engine, [first])["turn0"]
    assert completion.cached_prompt_tokens == 0
    ids = first.prompt_token_ids + completion.token_ids + prompt(5, seed=9)
    second = make_request("turn1", ids, max_tokens=4)
    engine.add(second)
    plan = engine.plan(PLENTY)
    assert plan is not None
    assert (plan.prefill[0].start, plan.prefill_tokens) == (24, len(ids) - 24)  # whole pages of the 27 computed tokens
    engine.submit(plan)
    engine.collect()
    completions = finish(engine)
    check_all([second], completions)
    assert completions["turn1"].cached_prompt_tokens == 24


def test_a_group_that_arrives_together_prefills_its_prompt_once() -> None:
    engine = make_engine()
    requests = [make_request(f"r{idx}", prompt(27), trajectory_id=idx) for idx in range(4)]
    for request in requests:
        engine.add(request)
    plan = engine.plan(PLENTY)
    assert plan is not None
    assert plan.prefill_tokens == 27 + 3 * 3
    engine.submit(plan)
    engine.collect()
    check_all(requests, finish(engine))
    pages_are_whole(engine)


def test_a_group_cut_by_the_token_limit_shares_as_far_as_the_first_one_got() -> None:
    engine = make_engine()
    requests = [make_request(f"r{idx}", prompt(40), trajectory_id=idx, max_tokens=4) for idx in range(4)]
    check_all(requests, serve(engine, requests, StepLimits(max_tokens=13)))


def test_without_prefix_reuse_everything_is_prefilled() -> None:
    engine = make_engine(dataclasses.replace(SMALL, prefix_reuse=False))
    requests = [make_request(f"r{idx}", prompt(16), trajectory_id=idx) for idx in range(2)]
    for request in requests:
        engine.add(request)
    plan = engine.plan(PLENTY)
    assert plan is not None
    assert plan.prefill_tokens == 32


def test_requests_get_by_with_too_few_pages() -> None:
    engine = make_tight_engine()
    requests = [make_request(f"r{idx}", prompt(30, seed=idx), trajectory_id=idx, max_tokens=30) for idx in range(5)]
    check_all(requests, serve(engine, requests))
    assert engine._scheduler.pools[0].num_available == SMALL.pages_per_context + 2


def test_a_higher_priority_takes_a_slot_and_its_pages_at_the_next_step_and_the_other_resumes_first() -> None:
    engine = make_tight_engine(max_slots=1)
    low = make_request("low", prompt(30), max_tokens=20)
    later = make_request("later", prompt(30, seed=1), max_tokens=20)
    high = make_request("high", prompt(40, seed=2), max_tokens=3, priority=1)
    engine.add(low)
    for _ in range(4):
        step(engine)
    engine.add(later)
    engine.add(high)
    plan = engine.plan(PLENTY)
    assert plan is not None
    assert [chunk.request_id for chunk in plan.prefill] == ["high"]
    assert plan.decode == ()
    engine.submit(plan)
    engine.collect()
    order, completions = [], {}
    while (result := step(engine)) is not None:
        order += [token.request_id for token in result.tokens if token.request_id not in order]
        completions.update({completion.request_id: completion for completion in result.completions})
    assert order == ["high", "low", "later"]
    check_all([low, later, high], completions)


@pytest.mark.parametrize("keep_cache", [True, False])
def test_preempt_and_resume_goes_on_from_the_same_state(keep_cache: bool) -> None:
    engine = make_engine()
    requests = [make_request(f"r{idx}", prompt(20 + idx, seed=idx), trajectory_id=idx, max_tokens=15) for idx in range(3)]
    for request in requests:
        engine.add(request)
    for _ in range(5):
        step(engine)
    engine.preempt("r1", keep_cache=keep_cache)
    engine.preempt("unknown", keep_cache=keep_cache)
    assert (engine.load().running_requests, engine.load().waiting_requests) == (2, 1)
    plan = engine.plan(PLENTY)
    assert plan is not None
    assert plan.prefill_tokens == (0 if keep_cache else 21 + 5)
    engine.submit(plan)
    engine.collect()
    completions = finish(engine)
    check_all(requests, completions)
    undisturbed = serve(make_engine(), requests)
    assert all(completions[name].token_ids == undisturbed[name].token_ids for name in completions)


def test_a_commit_labels_later_tokens_and_compiles_nothing() -> None:
    engine = make_engine()
    request = make_request("a", prompt(20), max_tokens=6)
    engine.add(request)
    step(engine)
    step(engine)
    engine.commit(params(1), version=5)
    completion = finish(engine)["a"]
    assert completion.weight_versions == (0, 0, 5, 5, 5, 5)
    assert engine.load().weight_version == 5


def test_a_commit_of_other_shapes_is_refused_and_the_old_weights_stay() -> None:
    engine = make_engine()
    broken = params(1)
    broken["final_norm"].value = broken["final_norm"].value[:-1]
    with pytest.raises(ValueError, match="final_norm"):
        engine.commit(broken, version=5)
    assert engine.load().weight_version == 0
    check_all([make_request()], serve(engine, [make_request()]))


@pytest.mark.parametrize("policy", list(StaleCache))
def test_stale_cache_is_kept_dropped_or_hidden_as_declared(policy: StaleCache) -> None:
    engine = make_engine(dataclasses.replace(SMALL, stale_cache=policy))
    serve(engine, [make_request("before", prompt(24))])
    running = make_request("running", prompt(20, seed=1), max_tokens=10)
    engine.add(running)
    for _ in range(3):
        step(engine)
    engine.commit(params(1), version=1)
    after = make_request("after", prompt(24), max_tokens=3)
    engine.add(after)
    completions = finish(engine)
    assert completions["after"].cached_prompt_tokens == (16 if policy is StaleCache.KEEP else 0)
    if policy is not StaleCache.KEEP:
        check_all([after], {"after": completions["after"]}, seed=1)
    if policy is StaleCache.DROP:
        new_tokens = dataclasses.replace(running, prompt_token_ids=running.prompt_token_ids + completions["running"].token_ids[:3])
        later = dataclasses.replace(
            completions["running"],
            token_ids=completions["running"].token_ids[3:],
            behavior_logprobs=completions["running"].behavior_logprobs[3:],
        )
        check_against_forward(new_tokens, later, seed=1)
    again = serve(engine, [make_request("again", prompt(24), max_tokens=3)])["again"]
    assert again.cached_prompt_tokens == 16
    mixed = serve(engine, [make_request("mixed", prompt(20, seed=1) + completions["running"].token_ids, max_tokens=1)])["mixed"]
    assert mixed.cached_prompt_tokens == (0 if policy is StaleCache.TAG else 24)


def test_a_tag_names_the_weights_and_not_only_their_number() -> None:
    engine = make_engine(dataclasses.replace(SMALL, stale_cache=StaleCache.TAG))
    request = make_request("a", prompt(24), max_tokens=3)
    serve(engine, [request])
    engine.commit(params(1), version=0)
    completion = serve(engine, [request])["a"]
    assert completion.cached_prompt_tokens == 0
    check_against_forward(request, completion, seed=1)
    assert serve(engine, [request])["a"].cached_prompt_tokens == 16


CHUNKED = JetStreamConfig(
    max_slots=4,
    max_context_tokens=MAX_CONTEXT,
    page_tokens=8,
    tile_tokens=8,
    max_prefill_tiles=8,
    num_chunks=2,
    min_chunks=1,
    row_buckets=(4,),
    tile_buckets=(8,),
    context_buckets=(MAX_CONTEXT,),
)


def test_a_chunk_can_be_given_up_and_taken_back_while_requests_run_and_nothing_compiles(compilations: list[str]) -> None:
    engine = make_engine(CHUNKED)
    engine.warm_up()
    compilations.clear()
    whole_bytes = engine.cache_bytes
    requests = [make_request(f"r{idx}", prompt(30, seed=idx), trajectory_id=idx, max_tokens=20) for idx in range(4)]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        step(engine)
    engine.remove_chunk()
    assert engine.cache_bytes == whole_bytes // 2
    with pytest.raises(ValueError, match="min_chunks=1"):
        engine.remove_chunk()
    for _ in range(4):
        step(engine)
    engine.add_chunk()
    with pytest.raises(ValueError, match="num_chunks=2"):
        engine.add_chunk()
    completions = finish(engine)
    assert compilations == []
    check_all(requests, completions)
    pages_are_whole(engine)


def test_a_plan_sent_as_text_runs_on_a_second_process_s_runner() -> None:
    engine = make_engine(CHUNKED)
    follower = StepRunner(CHUNKED, MODEL, params())
    requests = [make_request(f"r{idx}", prompt(15, seed=idx), trajectory_id=idx, top_p=0.9) for idx in range(3)]
    for request in requests:
        engine.add(request)
    while (plan := engine.plan(StepLimits(max_tokens=20))) is not None:
        drawn = None if plan.inputs is None else follower.run(StepInputs.from_dict(json.loads(json.dumps(plan.inputs.to_dict()))))
        engine.submit(plan)
        result = engine.collect()
        seen = {} if drawn is None else dict(zip(drawn.logprobs.ravel().tolist(), drawn.token_ids.ravel().tolist(), strict=True))
        for token in result.tokens:
            assert seen[token.behavior_logprob] == token.token_id
