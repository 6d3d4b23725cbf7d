"""After warm-up nothing compiles, whatever arrives."""

from __future__ import annotations

import dataclasses

import pytest

from common.serving.engine import StepLimits
from rose_jax.jetstream.compute import make_step
from rose_jax.jetstream.invariant import make_invariant_step
from tests.rose_jax.jetstream.serving_data import SMALL, make_engine, make_request, params, prompt, serve, step


@pytest.mark.parametrize("invariant", [False, True])
def test_nothing_compiles_after_warm_up(compilations: list[str], invariant: bool) -> None:
    make_step.cache_clear()
    make_invariant_step.cache_clear()
    engine = make_engine(dataclasses.replace(SMALL, row_buckets=(2, 4), invariant=invariant))
    other_weights = params(1)
    warm_up = engine.warm_up()
    assert warm_up.num_programs > 0
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
    for request in requests:
        engine.add(request)
    for _ in range(3):
        step(engine)
    engine.commit(other_weights, version=1)
    step(engine)
    engine.preempt("r1", keep_cache=False)
    serve(engine, [])
    assert compilations == []
