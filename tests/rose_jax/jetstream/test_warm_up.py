"""After warm-up nothing compiles, whatever arrives."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from common.serving.engine import StepLimits
from common.types import FinishReason
from rose_jax.jetstream.compute import make_step
from rose_jax.jetstream.invariant import make_invariant_step
from tests.rose_jax.jetstream.serving_data import MAX_CONTEXT, SMALL, make_engine, make_request, params, prompt, serve, step


@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_compiles_after_warm_up(compilations: list[str], invariant: bool) -> None:
    make_step.cache_clear()
    make_invariant_step.cache_clear()
    config = dataclasses.replace(SMALL, row_buckets=(2, 4), context_buckets=(32, MAX_CONTEXT), invariant=invariant)
    engine = make_engine(config)
    other_weights, bad_weights = params(1), jax.tree.map(lambda value: value * np.nan, params())
    warm_up = engine.warm_up()
    # rows x (no tiles, tiles, rows with options) x contexts; invariant mode has one shape
    assert warm_up.num_programs == (1 if invariant else 2 * 3 * 2)
    assert warm_up.duration_s > 0.0
    assert len(compilations) > 0
    compilations.clear()
    options: list[dict[str, object]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"num_top_logprobs": 3},
        {"stop_strings": ("zz",)},
        {"min_p": 0.1, "top_k": 4},
    ]
    requests = [
        make_request(f"r{idx}", prompt(1 + 9 * idx, seed=idx), max_tokens=1 + 2 * idx, priority=idx % 2, **option)
        for idx, option in enumerate(options)
    ]
    serve(engine, requests, StepLimits(max_tokens=11))
    serve(engine, requests[:2], StepLimits(max_tokens=11, tokens_per_sequence=8))
    for request in requests:
        engine.add(request)
    for _ in range(3):
        step(engine)
    engine.commit(other_weights, version=1)
    step(engine)
    engine.preempt("r1", keep_cache=False)
    serve(engine, [])
    engine.commit(bad_weights, version=2)
    assert serve(engine, requests[:1])["r0"].finish_reason is FinishReason.ERROR
    assert compilations == []
