"""The fake's prefix cache: what is matched was held, what is given up is oldest, and a commit does what its policy says."""

from __future__ import annotations

import pytest

from common.serving.engine import StaleCache, StepLimits
from common.serving.fake import FakeEngine
from common.serving.fake_model import EMPTY_CONTEXT, extend_context, make_weights
from common.serving.fake_prefix import PrefixStore
from common.types import Completion, Request, SamplingKey, SamplingParams

VOCAB_SIZE = 40


def test_a_match_ends_where_contexts_part() -> None:
    store = PrefixStore()
    store.put("a", extend_context(EMPTY_CONTEXT, [1, 2, 3, 4]))
    assert store.match("a", extend_context(EMPTY_CONTEXT, [1, 2, 3, 4, 5])) == 4
    assert store.match("a", extend_context(EMPTY_CONTEXT, [1, 2, 9, 4])) == 2
    assert store.match("a", extend_context(EMPTY_CONTEXT, [2, 3, 4])) == 0
    assert store.match("b", extend_context(EMPTY_CONTEXT, [1, 2, 3, 4])) == 0


def test_the_oldest_goes_first_and_a_context_from_its_end() -> None:
    store = PrefixStore()
    old, new = extend_context(EMPTY_CONTEXT, [1, 2, 3]), extend_context(EMPTY_CONTEXT, [7, 8])
    store.put("a", old)
    store.put("a", new)
    assert store.give_up(2) == 2
    assert (store.match("a", old), store.match("a", new)) == (1, 2)
    store.put("a", old[:1])
    assert store.give_up(2) == 2
    assert (store.match("a", old), store.match("a", new)) == (1, 0)
    assert store.give_up(5) == 1
    assert store.give_up(-3) == 0


def run(engine: FakeEngine, prompt: tuple[int, ...]) -> Completion:
    sampling, key = SamplingParams(max_tokens=3), SamplingKey(run_seed=0, trajectory_id=0, turn_idx=0)
    engine.add(Request(request_id="r", prompt_token_ids=prompt, sampling=sampling, key=key))
    while True:
        plan = engine.plan(StepLimits(max_tokens=50))
        assert plan is not None
        engine.submit(plan)
        for completion in engine.collect().completions:
            return completion


@pytest.mark.parametrize(("policy", "expected"), [(StaleCache.KEEP, 9), (StaleCache.DROP, 0), (StaleCache.TAG, 0)])
def test_prefixes_of_older_weights_are_used_as_the_policy_says(policy: StaleCache, expected: int) -> None:
    engine = FakeEngine(make_weights(0, VOCAB_SIZE), prefix_reuse=True, stale_cache=policy)
    prompt = tuple(range(10))
    assert run(engine, prompt).cached_prompt_tokens == 0
    assert run(engine, prompt).cached_prompt_tokens == 9
    engine.commit(make_weights(1, VOCAB_SIZE), version=1)
    assert run(engine, prompt).cached_prompt_tokens == expected


def test_a_dropped_cache_of_a_running_request_is_computed_again() -> None:
    engine = FakeEngine(make_weights(0, VOCAB_SIZE), stale_cache=StaleCache.DROP)
    key = SamplingKey(run_seed=0, trajectory_id=0, turn_idx=0)
    request = Request(request_id="r", prompt_token_ids=tuple(range(10)), sampling=SamplingParams(max_tokens=9), key=key)
    engine.add(request)
    for _ in range(3):
        plan = engine.plan(StepLimits(max_tokens=50))
        assert plan is not None
        engine.submit(plan)
        engine.collect()
    engine.commit(make_weights(1, VOCAB_SIZE), version=1)
    assert engine.load().used_cache_tokens == 0
    plan = engine.plan(StepLimits(max_tokens=50))
    assert plan is not None
    assert plan.prefill_tokens == 13
