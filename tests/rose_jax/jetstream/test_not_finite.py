"""Values that are not finite: they end the requests they belong to and leave nothing behind in the cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.serving.engine import StaleCache, StepLimits
from common.types import FinishReason
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.models.qwen3 import create_model
from tests.rose_jax.jetstream.serving_data import (
    MODEL,
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


def nan_params() -> nnx.State:
    return jax.tree.map(lambda value: value * np.nan, params())


def fill_cache_with_nan(engine: JetStreamEngine) -> None:
    for chunks in engine._runner._caches:
        chunks[:] = [jnp.full_like(chunk, jnp.nan) for chunk in chunks]


def test_logits_that_are_not_finite_end_the_request_with_an_error() -> None:
    engine = make_engine()
    engine.commit(nan_params(), version=7)
    completion = serve(engine, [make_request()])["a"]
    assert completion.finish_reason is FinishReason.ERROR
    assert "version 7" in (completion.error or "")


@pytest.mark.parametrize("policy", list(StaleCache))
@pytest.mark.parametrize("invariant", [False, True])
def test_good_weights_after_bad_ones_serve_as_ever(policy: StaleCache, invariant: bool) -> None:
    engine = make_engine(dataclasses.replace(SMALL, stale_cache=policy, invariant=invariant))
    requests = [make_request(f"r{idx}", prompt(30, seed=idx), trajectory_id=idx) for idx in range(5)]
    engine.commit(nan_params(), version=1)
    assert {end.finish_reason for end in serve(engine, requests).values()} == {FinishReason.ERROR}
    for request in requests:
        engine.add(request)
    step(engine, StepLimits(max_tokens=40))  # in mid-prefill, or before its first token is known to be bad
    engine.commit(params(), version=2)
    completions = finish(engine)
    assert completions.keys() == {request.request_id for request in requests}
    for request in requests:
        completion = completions[request.request_id]
        assert completion.finish_reason is FinishReason.LENGTH, completion.error
        check_against_forward(request, completion)


def test_pages_that_hold_nan_spoil_no_request_for_good() -> None:
    engine = make_engine()
    requests = [make_request(f"r{idx}", prompt(20 + idx, seed=idx), trajectory_id=idx, max_tokens=12) for idx in range(3)]
    for request in requests:
        engine.add(request)
    for _ in range(4):
        step(engine)
    fill_cache_with_nan(engine)
    completions = finish(engine, StepLimits(max_tokens=1024, tokens_per_sequence=4))
    for request in requests:
        assert completions[request.request_id].finish_reason is FinishReason.LENGTH
        check_against_forward(request, completions[request.request_id])
    assert engine.load().used_cache_tokens == 0


def test_a_token_whose_embedding_is_not_finite_fails_only_the_requests_that_hold_it() -> None:
    bad_token = 5
    model_config = dataclasses.replace(MODEL, tie_word_embeddings=False)
    weights = nnx.state(create_model(model_config, seed=0, embedding_init_std=0.3))
    weights["embed_tokens"].value = weights["embed_tokens"].value.at[bad_token].set(jnp.nan)
    engine = JetStreamEngine(SMALL, model_config, weights, version=0)
    clean = [make_request(f"clean{idx}", [token_id % 5 for token_id in prompt(9 + 9 * idx)], max_tokens=1) for idx in range(3)]
    bad = make_request("bad", (*prompt(9), bad_token), max_tokens=1)
    for requests in ([bad, *clean], [clean[0], bad, *clean[1:]]):  # which of them has the first page differs
        completions = serve(engine, requests)
        assert {name for name, end in completions.items() if end.finish_reason is FinishReason.ERROR} == {"bad"}
    assert {end.finish_reason for end in serve(engine, clean).values()} == {FinishReason.LENGTH}
