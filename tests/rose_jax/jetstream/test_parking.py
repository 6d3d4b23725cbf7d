"""A parked JetStream engine: its memory goes, its weights can be read, and it comes back bit for bit."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from common.serving.engine import StepLimits
from common.types import Request, SamplingKey, SamplingParams
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.models.qwen3 import create_model
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.weight_target import JaxWeightTarget
from tests.common.serving.test_parking import anonymous_bytes

MODEL = Qwen3Config(
    vocab_size=4096,
    hidden_size=512,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=1024,
    tie_word_embeddings=True,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    pad_token_id=0,
    eos_token_id=1,
)


def logprobs(engine: JetStreamEngine) -> tuple[float, ...]:
    engine.add(
        Request(
            request_id="r",
            prompt_token_ids=tuple(range(2, 20)),
            sampling=SamplingParams(max_tokens=4),
            key=SamplingKey(run_seed=0, trajectory_id=0, turn_idx=0),
        )
    )
    while True:
        plan = engine.plan(StepLimits(max_tokens=64))
        assert plan is not None
        engine.submit(plan)
        result = engine.collect()
        if result.completions:
            return result.completions[0].behavior_logprobs


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
