"""A small model, engines over it, and what a full forward pass says about their tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.serving.engine import StepLimits, StepResult
from common.types import Completion, Request, SamplingKey, SamplingParams
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.models.qwen3 import Qwen3, causal_attention, create_model
from rose_jax.models.qwen3_config import Qwen3Config

VOCAB_SIZE = 37
MODEL = Qwen3Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=True,
    rope_theta=10_000.0,
    rms_norm_eps=1e-6,
    max_position_embeddings=128,
    pad_token_id=0,
    eos_token_id=1,
)
MAX_CONTEXT = 64
SMALL = JetStreamConfig(
    max_slots=4,
    max_context_tokens=MAX_CONTEXT,
    page_tokens=8,
    tile_tokens=8,
    max_prefill_tiles=8,
    row_buckets=(4,),
    tile_buckets=(8,),
    context_buckets=(MAX_CONTEXT,),
)
PLENTY = StepLimits(max_tokens=1024)


@functools.cache
def model(seed: int = 0) -> Qwen3:
    return create_model(MODEL, seed=seed, embedding_init_std=0.3)


def params(seed: int = 0) -> nnx.State:
    return jax.tree.map(lambda value: value, nnx.state(model(seed)))  # own variables: a test may replace their values


def make_engine(config: JetStreamConfig = SMALL, *, seed: int = 0, mesh: Mesh | None = None) -> JetStreamEngine:
    return JetStreamEngine(config, MODEL, params(seed), version=0, decode=letters, mesh=mesh)


def letters(token_ids: Sequence[int]) -> str:
    """Token 0 is "a", token 26 "A", and so on."""
    return "".join(chr((97 if token_id < 26 else 39) + token_id) for token_id in token_ids)


def prompt(length: int, *, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist())


def make_request(
    request_id: str = "a",
    prompt_token_ids: Sequence[int] = prompt(11),
    *,
    priority: int = 0,
    trajectory_id: int = 0,
    max_tokens: int = 8,
    **sampling: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
        key=SamplingKey(run_seed=0, trajectory_id=trajectory_id, turn_idx=0),
        priority=priority,
    )


def step(engine: JetStreamEngine, limits: StepLimits = PLENTY) -> StepResult | None:
    plan = engine.plan(limits)
    if plan is None:
        return None
    assert plan.num_tokens <= limits.max_tokens
    engine.submit(plan)
    return engine.collect()


def finish(engine: JetStreamEngine, limits: StepLimits = PLENTY) -> dict[str, Completion]:
    """Step until nothing is left; every request must have ended exactly once."""
    completions: dict[str, Completion] = {}
    while (result := step(engine, limits)) is not None:
        for completion in result.completions:
            assert completion.request_id not in completions
            completions[completion.request_id] = completion
    assert engine.load().running_requests == engine.load().waiting_requests == 0
    return completions


def serve(engine: JetStreamEngine, requests: Iterable[Request], limits: StepLimits = PLENTY) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    return finish(engine, limits)


@jax.jit
def _log_softmax(graph_and_state: tuple, token_ids: jax.Array, temperature: float) -> jax.Array:
    reference: Qwen3 = nnx.merge(*graph_and_state)
    hidden = reference(token_ids, jnp.arange(token_ids.shape[1])[None], causal_attention)
    return jax.nn.log_softmax(reference.logits(hidden)[0] / temperature, axis=-1)


def forward_logprobs(token_ids: Sequence[int], *, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
    """[T, V]: row t is the distribution of token t + 1 given the tokens up to t, by one full forward pass."""
    padded = np.zeros((1, MODEL.max_position_embeddings), np.int32)
    padded[0, : len(token_ids)] = token_ids
    return np.asarray(_log_softmax(nnx.split(model(seed)), jnp.asarray(padded), temperature))[: len(token_ids)]


def check_against_forward(request: Request, completion: Completion, *, seed: int = 0) -> None:
    """Log-probabilities to 1e-4; greedy tokens the best ones, unless the top two lie within 1e-3."""
    temperature = request.sampling.temperature
    ids = request.prompt_token_ids + completion.token_ids
    expected = forward_logprobs(ids, temperature=temperature or 1.0, seed=seed)[len(request.prompt_token_ids) - 1 : -1]
    chosen = expected[np.arange(len(completion.token_ids)), completion.token_ids]
    np.testing.assert_allclose(completion.behavior_logprobs, chosen, atol=1e-4)
    if temperature == 0.0:
        assert np.all(chosen >= expected.max(axis=-1) - 1e-3)
