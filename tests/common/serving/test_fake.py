"""What the fake engine adds to the contract: pretended time, two ranks, a bounded cache. The contract itself: tests/conformance."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.clock import FakeClock
from common.errors import EngineClosedError
from common.serving.engine import DecodeEntry, PrefillChunk, StepLimits, StepPlan
from common.serving.fake import FakeEngine, StepTiming
from common.serving.fake_model import draw_token, make_weights, uniform_draw
from common.serving.fake_ranks import FollowerRank, TwoRankFakeEngine, decode_weights, encode_weights
from common.serving.wire import decode_plan, decode_request, encode_plan, encode_request
from common.types import Completion, Request, SamplingKey, SamplingParams

VOCAB_SIZE = 40
WEIGHTS = make_weights(0, VOCAB_SIZE)
TIMING = StepTiming(fixed_s=1.0, prefill_token_s=0.1, decode_sequence_s=0.01, context_token_s=0.001)


def request(request_id: str, *, length: int = 5, max_tokens: int = 4, priority: int = 0) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(length)),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=0, trajectory_id=len(request_id), turn_idx=0),
        priority=priority,
    )


def step(engine: FakeEngine | TwoRankFakeEngine, max_tokens: int = 100) -> StepPlan | None:
    plan = engine.plan(StepLimits(max_tokens=max_tokens))
    if plan is not None:
        engine.submit(plan)
        engine.collect()
    return plan


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_lasts_as_long_as_its_plan_says(asynchronous: bool) -> None:
    clock = FakeClock()
    engine = FakeEngine(WEIGHTS, timing=TIMING, clock=clock, asynchronous=asynchronous)
    engine.add(request("r"))
    plan = engine.plan(StepLimits(max_tokens=100))
    assert plan is not None
    engine.submit(plan)
    assert clock.now_s() == (0.0 if asynchronous else pytest.approx(1.5))
    assert engine.collect().device_s == pytest.approx(1.5)
    assert clock.now_s() == pytest.approx(1.5)
    step(engine)
    assert clock.now_s() == pytest.approx(1.5 + 1.0 + 0.01 + 5 * 0.001)


def test_an_asynchronous_step_overlaps_with_what_the_host_does_meanwhile() -> None:
    clock = FakeClock()
    engine = FakeEngine(WEIGHTS, timing=TIMING, clock=clock, asynchronous=True)
    engine.add(request("r"))
    plan = engine.plan(StepLimits(max_tokens=100))
    assert plan is not None
    engine.submit(plan)
    clock.advance(10.0)
    engine.drain()
    assert clock.now_s() == 10.0


def test_misuse_with_a_step_in_flight_fails_an_assertion() -> None:
    engine = FakeEngine(WEIGHTS, asynchronous=True)
    engine.add(request("r"))
    plan = engine.plan(StepLimits(max_tokens=100))
    assert plan is not None
    engine.submit(plan)
    with pytest.raises(AssertionError, match="in flight"):
        engine.plan(StepLimits(max_tokens=100))
    with pytest.raises(AssertionError, match="in flight"):
        engine.submit(plan)
    with pytest.raises(AssertionError, match="in flight"):
        engine.preempt("r", keep_cache=True)
    with pytest.raises(AssertionError, match="in flight"):
        engine.commit(WEIGHTS, version=1)


def test_a_stale_plan_is_refused() -> None:
    engine = FakeEngine(WEIGHTS)
    engine.add(request("r"))
    plan = engine.plan(StepLimits(max_tokens=100))
    assert plan is not None
    step(engine)
    with pytest.raises(AssertionError, match="newest plan is 1"):
        engine.submit(plan)


def test_a_closed_engine_says_so() -> None:
    engine = FakeEngine(WEIGHTS)
    engine.close()
    with pytest.raises(EngineClosedError, match="make a new one"):
        engine.add(request("r"))


def test_the_caller_may_overwrite_weights_it_has_committed() -> None:
    engine, mine = FakeEngine(WEIGHTS), make_weights(1, VOCAB_SIZE)
    engine.commit(mine, version=1)
    before = engine.state_digest()
    mine["table"][:] = 0.0
    assert engine.state_digest() == before


def test_the_cache_never_holds_more_than_its_capacity() -> None:
    engine = FakeEngine(WEIGHTS, max_slots=4, max_context_tokens=16, cache_capacity_tokens=20)
    for idx in range(6):
        engine.add(request("r" * (idx + 1), length=8, max_tokens=8, priority=idx % 2))
    num_steps = 0
    while step(engine) is not None:
        num_steps += 1
        assert engine.load().used_cache_tokens <= 20
    assert num_steps < 200


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="cache_capacity_tokens=10 cannot hold one request of max_context_tokens=16"):
        FakeEngine(WEIGHTS, max_context_tokens=16, cache_capacity_tokens=10)
    with pytest.raises(ValueError, match="max_slots=0"):
        FakeEngine(WEIGHTS, max_slots=0)
    with pytest.raises(ValueError, match="max_tokens=0"):
        FakeEngine(WEIGHTS).plan(StepLimits(max_tokens=0))


class _WrongFollower(FollowerRank):
    """Draws its tokens under other weights, as a rank that missed an update would."""

    def handle(self, message: str) -> str | None:
        fields = json.loads(message)
        if fields["call"] == "commit":
            fields["body"]["weights"] = encode_weights(make_weights(9, VOCAB_SIZE))
        return super().handle(json.dumps(fields))


def test_a_follower_that_differs_is_noticed_at_the_next_comparison() -> None:
    engine = TwoRankFakeEngine(FakeEngine(WEIGHTS), FakeEngine(WEIGHTS))
    engine._follower = _WrongFollower(FakeEngine(WEIGHTS))
    engine.add(request("r"))
    step(engine)
    with pytest.raises(AssertionError, match="the ranks differ after commit"):
        engine.commit(make_weights(1, VOCAB_SIZE), version=1)


def test_ranks_that_start_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="differ before the first call"):
        TwoRankFakeEngine(FakeEngine(WEIGHTS), FakeEngine(make_weights(1, VOCAB_SIZE)))


def test_weights_survive_the_wire_bit_for_bit() -> None:
    again = decode_weights(encode_weights(WEIGHTS))
    assert {name: value.tobytes() for name, value in again.items()} == {name: value.tobytes() for name, value in WEIGHTS.items()}
    assert {name: value.dtype for name, value in again.items()} == {name: value.dtype for name, value in WEIGHTS.items()}


_IDS = st.text(max_size=12)
_COUNTS = st.integers(0, 10**6)
_PLANS = st.builds(
    StepPlan,
    step_id=_COUNTS,
    prefill=st.lists(st.builds(PrefillChunk, request_id=_IDS, slot_idx=_COUNTS, start=_COUNTS, num_tokens=_COUNTS), max_size=4).map(
        tuple
    ),
    decode=st.lists(st.builds(DecodeEntry, request_id=_IDS, slot_idx=_COUNTS, context_tokens=_COUNTS), max_size=4).map(tuple),
)
_REQUESTS = st.builds(
    Request,
    request_id=_IDS,
    prompt_token_ids=st.lists(_COUNTS, max_size=8).map(tuple),
    sampling=st.builds(
        SamplingParams,
        max_tokens=_COUNTS,
        temperature=st.floats(0, 10),
        top_k=st.none() | _COUNTS,
        stop_token_ids=st.lists(_COUNTS, max_size=3).map(tuple),
        stop_strings=st.lists(_IDS, max_size=3).map(tuple),
    ),
    key=st.builds(SamplingKey, run_seed=_COUNTS, trajectory_id=_COUNTS, turn_idx=_COUNTS),
    priority=st.integers(-5, 5),
)


@settings(max_examples=30, deadline=None)
@given(plan=_PLANS, request=_REQUESTS)
def test_plans_and_requests_survive_the_wire(plan: StepPlan, request: Request) -> None:
    assert decode_plan(encode_plan(plan)) == plan
    assert decode_request(encode_request(request)) == request


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step_id": 0, "prefill": [], "decode": [], "extra": 1}', "null"])
def test_what_is_no_plan_or_request_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an encoded step plan"):
        decode_plan(text)
    with pytest.raises(ValueError, match="not an encoded request"):
        decode_request(text)


@pytest.mark.parametrize("options", [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.8, "top_k": 3, "min_p": 0.05}])
def test_truncated_draws_follow_the_renormalised_distribution(options: dict) -> None:
    """Against an independent computation: sort, cut, renormalise, count."""
    logits = np.linspace(2.0, -2.0, 12, dtype=np.float32)
    params = SamplingParams(max_tokens=1, **options)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum()
    before = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
    keep = (before < options.get("top_p", 1.0)) & (probs >= options.get("min_p", 0.0) * probs[0])
    keep &= np.arange(12) < options.get("top_k", 12)
    expected = np.where(keep, probs, 0.0) / probs[keep].sum()
    num_draws = 4000
    draws = [(idx + 0.5) / num_draws for idx in range(num_draws)]
    counts = np.bincount([draw_token(logits, params, draw)[0] for draw in draws], minlength=12)
    np.testing.assert_allclose(counts / num_draws, expected, atol=1e-3)
    np.testing.assert_allclose(draw_token(logits, params, 0.5)[1], np.log(probs), atol=1e-6)


def test_uniform_draws_are_uniform_and_differ_in_every_part_of_the_key() -> None:
    key = SamplingKey(run_seed=1, trajectory_id=2, turn_idx=3)
    draws = [uniform_draw(dataclasses.replace(key, trajectory_id=idx), position) for idx in range(100) for position in range(20)]
    assert np.histogram(draws, bins=10, range=(0, 1))[0].min() > 150
    assert len(set(draws)) == len(draws)
    others = [dataclasses.replace(key, **{name: 9}) for name in ("run_seed", "trajectory_id", "turn_idx")]
    assert len({uniform_draw(other, 0) for other in (key, *others)}) == 4


def test_completions_say_what_the_whole_context_was() -> None:
    """A prompt that differs in its first token only gives other logits: nothing in the context is forgotten."""
    ends: list[Completion] = []
    for first in (1, 2):
        engine = FakeEngine(WEIGHTS)
        engine.add(dataclasses.replace(request("r"), prompt_token_ids=(first, *range(20))))
        while (plan := engine.plan(StepLimits(max_tokens=7))) is not None:
            engine.submit(plan)
            ends += engine.collect().completions
    assert ends[0].behavior_logprobs != ends[1].behavior_logprobs
