"""A parked JetStream engine: its memory goes, its weights can be read, and it comes back bit for bit."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from flax import nnx

from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.models.qwen3 import create_model
from rose_jax.weight_target import JaxWeightTarget
from tests.common.serving.test_parking import anonymous_bytes
from tests.conformance.driver import Driver, make_request, prompt
from tests.rose_jax.jetstream import serving_data

MODEL = dataclasses.replace(
    serving_data.MODEL, vocab_size=4096, hidden_size=512, head_dim=64, intermediate_size=1024, max_position_embeddings=512
)
"""Large enough for its weights to be seen in the process's memory."""


def logprobs(engine: JetStreamEngine) -> tuple[float, ...]:
    return Driver(engine).run_alone(make_request("r", prompt(18, salt=3), max_tokens=4)).behavior_logprobs


def test_memory_goes_weights_stay_readable_and_nothing_changes() -> None:
    params = nnx.state(create_model(MODEL, seed=0))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    config = JetStreamConfig(
        max_slots=8, max_context_tokens=512, page_tokens=16, max_prefill_tiles=4, row_buckets=(8,), tile_buckets=(4,)
    )
    engine = JetStreamEngine(config, MODEL, params, version=0, name="parked")
    target = JaxWeightTarget(engine, MODEL, params, weights_dtype="float32")
    before, held = logprobs(engine), anonymous_bytes()
    names = list(target.specs())
    bits = {name: target.read(name, np.arange(1000, dtype=np.uint64)) for name in names if np.prod(target.specs()[name][0]) > 1000}
    num_pieces = sum(1 for _ in engine.park())
    assert num_pieces >= num_bytes // (4 << 20)
    assert anonymous_bytes() <= held - 0.9 * num_bytes
    for name, expected in bits.items():
        np.testing.assert_array_equal(target.read(name, np.arange(1000, dtype=np.uint64)), expected)
    assert sum(1 for _ in engine.activate()) >= num_bytes // (4 << 20)
    assert logprobs(engine) == before
    assert anonymous_bytes() >= held - 0.2 * num_bytes - engine._runner.cache_bytes
    engine.close()
