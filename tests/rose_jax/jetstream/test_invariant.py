"""Invariant mode: a request's tokens and log-probabilities, bit for bit, whatever happens around it."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from common.serving.engine import StepLimits
from common.types import Completion, Request
from rose_jax.jetstream.engine import JetStreamEngine
from tests.rose_jax.jetstream.serving_data import (
    SMALL,
    VOCAB_SIZE,
    check_against_forward,
    make_engine,
    make_request,
    prompt,
    serve,
    step,
)
from tests.rose_jax.jetstream.test_cache import CHUNKED

INVARIANT = dataclasses.replace(CHUNKED, invariant=True)
NUM_SCHEDULES = 12


def watched_requests() -> list[Request]:
    """Prompts that end anywhere in a tile, two that share a beginning, one whose prompt is another's prompt and completion."""
    return [
        make_request("one", prompt(1), trajectory_id=1, max_tokens=9),
        make_request("tile", prompt(16, seed=2), trajectory_id=2, max_tokens=20),
        make_request("long", prompt(45, seed=3), trajectory_id=3, max_tokens=12),
        make_request("shared", (*prompt(45, seed=3)[:29], 5, 6), trajectory_id=4, max_tokens=12, top_p=0.9, num_top_logprobs=2),
    ]


def alone(requests: list[Request]) -> dict[str, Completion]:
    return {request.request_id: serve(make_engine(INVARIANT), [request])[request.request_id] for request in requests}


def disturbed(engine: JetStreamEngine, requests: list[Request], seed: int) -> dict[str, Completion]:
    """Serve under a random schedule: limits that change, other requests that come, go and displace, preemptions, lost chunks."""
    rng = random.Random(seed)
    upcoming, completions = list(requests), {}
    rng.shuffle(upcoming)
    for step_idx in range(10_000):
        if upcoming and rng.random() < 0.3:
            engine.add(upcoming.pop())
        if rng.random() < 0.2:
            length = rng.randrange(1, 50)
            start = rng.choice(requests).prompt_token_ids[:length]
            filler = start + tuple(rng.randrange(VOCAB_SIZE) for _ in range(length - len(start)))
            engine.add(make_request(f"mate{step_idx}", filler, priority=rng.choice([0, 1]), max_tokens=rng.randrange(1, 12)))
        action = rng.random()
        if action < 0.1:
            engine.preempt(rng.choice(requests).request_id, keep_cache=rng.random() < 0.3)
        elif action < 0.15 and engine.load().capacity_cache_tokens == 256:
            engine.remove_chunk()
        elif action < 0.2 and engine.load().capacity_cache_tokens == 128:
            engine.add_chunk()
        elif action < 0.25:
            engine.abort(f"mate{rng.randrange(step_idx + 1)}")
        result = step(engine, StepLimits(max_tokens=rng.choice([1, 2, 5, 9, 30, 200])))
        if result is not None:
            completions.update({end.request_id: end for end in result.completions})
        if all(request.request_id in completions for request in requests):
            return completions
    raise AssertionError("the watched requests did not end")


def bits(completion: Completion) -> tuple:
    return (
        completion.token_ids,
        np.float32(completion.behavior_logprobs).tobytes(),
        [(ids, np.float32(value).tobytes()) for pairs in completion.top_logprobs for ids, value in pairs],
    )


@pytest.fixture(scope="module")
def expected() -> dict[str, Completion]:
    return alone(watched_requests())


def test_invariant_mode_computes_what_a_full_forward_pass_does(expected: dict[str, Completion]) -> None:
    for request in watched_requests():
        check_against_forward(request, expected[request.request_id])


@pytest.mark.parametrize("seed", range(NUM_SCHEDULES))
def test_no_schedule_changes_a_bit(expected: dict[str, Completion], seed: int) -> None:
    completions = disturbed(make_engine(INVARIANT), watched_requests(), seed)
    for name, completion in expected.items():
        assert bits(completions[name]) == bits(completion), name


def test_a_turn_after_another_is_the_same_with_and_without_the_cached_first_one() -> None:
    first = make_request("first", prompt(13, seed=4), max_tokens=20)
    warm = make_engine(INVARIANT)
    completion = serve(warm, [first])["first"]
    second = make_request("second", first.prompt_token_ids + completion.token_ids + (3, 4), max_tokens=10)
    cached = serve(warm, [second])["second"]
    fresh = serve(make_engine(INVARIANT), [second])["second"]
    assert (cached.cached_prompt_tokens, fresh.cached_prompt_tokens) == (32, 0)
    assert bits(cached) == bits(fresh)


def test_the_fast_mode_is_not_what_is_tested_here() -> None:
    """The schedules above do change the last bits of the fast mode, so equality in invariant mode says something."""
    requests = watched_requests()
    undisturbed = {request.request_id: serve(make_engine(SMALL), [request])[request.request_id] for request in requests}
    changed = 0
    for seed in range(3):
        completions = disturbed(make_engine(CHUNKED), requests, seed)
        changed += sum(bits(completions[name]) != bits(completion) for name, completion in undisturbed.items())
    assert changed > 0
