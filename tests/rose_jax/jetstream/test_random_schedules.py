"""Random schedules over tiny caches: whatever is called in whatever order, everybody ends once, no page is lost, and every token is
what its weights say of the tokens before it."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest

from common.serving.engine import StaleCache, StepLimits, StepResult
from common.types import Completion, FinishReason, Request
from rose_jax.jetstream.config import JetStreamConfig
from tests.rose_jax.jetstream.serving_data import VOCAB_SIZE, forward_logprobs, make_engine, make_request, params

CONFIG = JetStreamConfig(
    max_slots=3,
    max_context_tokens=23,
    page_tokens=4,
    tile_tokens=4,
    max_prefill_tiles=3,
    row_buckets=(3,),
    tile_buckets=(3,),
    context_buckets=(8, 24),
    num_chunks=2,
    min_chunks=1,
    pages_per_chunk=7,
    stale_cache=StaleCache.DROP,
)
"""Two slots' worth of pages for three, each chunk barely larger than one request; sizes that divide nothing."""
OPTIONS: tuple[dict, ...] = (
    *({}, {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 3, "num_top_logprobs": 3}, {"top_p": 0.7, "min_p": 0.05}),
    *({"stop_token_ids": (3, 8, 21)}, {"stop_token_ids": tuple(range(0, VOCAB_SIZE, 6))}, {"stop_strings": ("a", "bc", "F")}),
)
MAX_STEPS = 3_000


class Schedule:
    """One engine, the calls that `rng` draws, and what must hold after each of them."""

    def __init__(self, config: JetStreamConfig, rng: random.Random, *, num_requests: int) -> None:
        self.config, self.rng, self.num_requests = config, rng, num_requests
        self.engine = make_engine(config)
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.completions: dict[str, Completion] = {}
        self.seeds = [0]
        """Of the weights of each version."""

    def run(self) -> None:
        for _ in range(MAX_STEPS):
            if len(self.requests) < self.num_requests and self.rng.random() < 0.4:
                self.add()
            self.disturb()
            limits = StepLimits(
                max_tokens=self.rng.choice([1, 2, 3, 7, 20, 100]), tokens_per_sequence=self.rng.choice([1, 1, 2, 3, 8])
            )
            plan = self.engine.plan(limits)
            self.check_pages()
            if plan is None:
                assert self.completions.keys() == self.requests.keys()
                if len(self.requests) == self.num_requests:
                    break
                continue
            assert plan.num_tokens <= limits.max_tokens
            if self.rng.random() < 0.2:
                self.disturb()  # may make another plan necessary
                plan = self.engine.plan(limits)
            if plan is None:
                continue
            self.engine.submit(plan)
            if self.rng.random() < 0.1:
                self.abort()
            self.take(self.engine.collect())
            self.check_pages()
        assert self.completions.keys() == self.requests.keys()
        assert self.engine.drain() is None
        assert all(pool.num_available == pool.num_pages for pool in self.engine._scheduler.pools)

    def add(self) -> None:
        rng, longest = self.rng, self.config.max_context_tokens
        length = rng.choice([1, rng.randrange(1, longest), longest - 1])
        beginning = rng.choice(list(self.requests.values())).prompt_token_ids if self.requests and rng.random() < 0.6 else ()
        token_ids = [*beginning[:length], *(rng.randrange(VOCAB_SIZE) for _ in range(length - len(beginning)))]
        request = make_request(
            f"r{len(self.requests)}",
            token_ids,
            priority=rng.choice([0, 0, 1, 2]),
            trajectory_id=len(self.requests),
            max_tokens=rng.randrange(1, longest - length + 1),
            **rng.choice(OPTIONS),
        )
        request = dataclasses.replace(request, cache_namespace=rng.choice(["", "", "other"]))
        self.requests[request.request_id] = request
        self.engine.add(request)

    def abort(self) -> None:
        request_id = f"r{self.rng.randrange(self.num_requests)}"
        if request_id in self.requests and request_id not in self.completions:
            self.aborted.add(request_id)
        self.engine.abort(request_id)

    def disturb(self) -> None:
        """One of the calls that may come between two steps, with or without a plan at hand, or none."""
        action = self.rng.random()
        if action < 0.05:
            self.abort()
        elif action < 0.15:
            self.engine.preempt(f"r{self.rng.randrange(self.num_requests)}", keep_cache=self.rng.random() < 0.5)
        elif action < 0.2:
            self.take(self.engine.drain())
            self.seeds.append(self.rng.choice([0, 1]))
            self.engine.commit(params(self.seeds[-1]), version=len(self.seeds) - 1)
        elif action < 0.25 and len(self.engine._scheduler.pools) == 2:
            self.engine.remove_chunk()
        elif action < 0.3 and len(self.engine._scheduler.pools) == 1:
            self.engine.add_chunk()

    def take(self, result: StepResult | None) -> None:
        for completion in result.completions if result else ():
            assert completion.request_id in self.requests
            assert completion.request_id not in self.completions
            self.completions[completion.request_id] = completion

    def check_pages(self) -> None:
        """Every page of a pool is held by exactly those sequences that name it."""
        scheduler = self.engine._scheduler
        held = Counter((id(item.pool), page) for item in [*scheduler.running, *scheduler.waiting] for page in item.pages)
        for pool in scheduler.pools:
            pool.check()
            assert pool._holders == [held.pop((id(pool), page), 0) for page in range(pool.num_pages)]
        assert not held
        slots = [item.slot_idx for item in scheduler.running]
        assert sorted([*slots, *scheduler._free_slots]) == list(range(self.config.max_slots))


def check_tokens(request: Request, completion: Completion, seeds: list[int]) -> None:
    """Each token against a full forward pass under the weights it was sampled with."""
    temperature, start = request.sampling.temperature, len(request.prompt_token_ids) - 1
    for seed in {seeds[version] for version in completion.weight_versions}:
        token_ids = request.prompt_token_ids + completion.token_ids
        expected = forward_logprobs(token_ids, temperature=temperature or 1.0, seed=seed)[start:-1]
        for idx, (token_id, version) in enumerate(zip(completion.token_ids, completion.weight_versions, strict=True)):
            if seeds[version] != seed:
                continue
            assert completion.behavior_logprobs[idx] == pytest.approx(expected[idx, token_id], abs=1e-4)
            assert temperature > 0.0 or expected[idx, token_id] >= expected[idx].max() - 1e-3
            top = [value for _, value in completion.top_logprobs[idx]] if completion.top_logprobs else []
            np.testing.assert_allclose(top, np.sort(expected[idx])[::-1][: request.sampling.num_top_logprobs], atol=1e-4)


@pytest.mark.parametrize("invariant", [False, True])
def test_everybody_ends_once_no_page_is_lost_and_every_token_is_right(invariant: bool) -> None:
    for seed in range(8):
        schedule = Schedule(dataclasses.replace(CONFIG, invariant=invariant), random.Random(seed), num_requests=12)
        schedule.run()
        for request_id, completion in schedule.completions.items():
            request = schedule.requests[request_id]
            check_tokens(request, completion, schedule.seeds)
            match completion.finish_reason:
                case FinishReason.ABORTED:
                    assert request_id in schedule.aborted
                case FinishReason.LENGTH:
                    assert len(completion.token_ids) == request.sampling.max_tokens
                case FinishReason.STOP:
                    assert request.sampling.stop_strings or completion.token_ids[-1] in request.sampling.stop_token_ids
                case FinishReason.ERROR:
                    raise AssertionError(completion.error)
