"""How far the log-probabilities of learner, JetStream and vLLM lie apart on the same weights and tokens.

A small Qwen3 with drawn weights scores drawn tokens. Each engine is asked for the distribution after every prefix, so that all of
them score exactly the same tokens; the learner's figures come from the function its loss uses. Weights and activations have the
row's dtype. Rows: dtype, pair, tokens, and mean, p99, max of the absolute difference.

    python -m scripts.bench_agreement --out=agreement.json [--prompts=16] [--engines=jetstream,vllm]
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from jaxtyping import Int

from common.serving.engine import StepEngine, StepLimits
from common.types import Request, SamplingKey, SamplingParams
from rose_jax.export import save_checkpoint
from rose_jax.models.qwen3 import abstract_model, cast_weights, create_model, sequence_logprobs
from rose_jax.models.qwen3_config import Qwen3Config
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows": [...]} to.', flag_values=_FLAGS)
_PROMPTS = flags.DEFINE_integer("prompts", 16, "Sequences that are scored.", lower_bound=1, flag_values=_FLAGS)
_ENGINES = flags.DEFINE_list("engines", ["jetstream", "vllm"], "Engines to compare with the learner.", flag_values=_FLAGS)

MODEL = Qwen3Config(
    vocab_size=96,
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    tie_word_embeddings=True,
    max_position_embeddings=256,
)
EMBEDDING_STD = 0.12
LENGTH, FIRST_SCORED = 48, 8
DTYPES = ("float32", "bfloat16")


def learner_logprobs(weights: nnx.State, token_ids: Int[np.ndarray, "B T"]) -> np.ndarray:
    """What the learner's loss sees: log-probabilities of each token given those before it, [B, T], float32; 0 at index 0."""
    graph, _ = nnx.split(abstract_model(MODEL))

    @jax.jit
    def score(state: nnx.State, ids: jax.Array) -> jax.Array:
        return sequence_logprobs(nnx.merge(graph, state), ids, chunk_tokens=LENGTH, remat=False)[0]

    return np.asarray(score(weights, jnp.asarray(token_ids)), np.float32)


def engine_logprobs(engine: StepEngine, token_ids: Int[np.ndarray, "B T"]) -> np.ndarray:
    """The same as `learner_logprobs` from position FIRST_SCORED on, read off the distribution after each prefix."""
    found = np.full((len(token_ids), LENGTH - FIRST_SCORED), np.nan, np.float32)
    for row, position in np.ndindex(found.shape):
        length = FIRST_SCORED + position
        sampling = SamplingParams(max_tokens=1, temperature=0.0, num_top_logprobs=MODEL.vocab_size)
        key = SamplingKey(run_seed=0, trajectory_id=row, turn_idx=length)
        prompt = tuple(token_ids[row, :length].tolist())
        engine.add(Request(request_id=f"{row} {length}", prompt_token_ids=prompt, sampling=sampling, key=key))
    while (plan := engine.plan(StepLimits(max_tokens=2048))) is not None:
        engine.submit(plan)
        for completion in engine.collect().completions:
            row, length = map(int, completion.request_id.split())
            found[row, length - FIRST_SCORED] = dict(completion.top_logprobs[0])[int(token_ids[row, length])]
    assert np.isfinite(found).all()
    return found


def make_engine(name: str, weights: nnx.State, dtype: str, folder: Path) -> StepEngine:
    if name == "vllm":
        from rose_gpu.vllm.engine import VllmEngine
        from rose_gpu.vllm.options import VllmOptions

        save_checkpoint(folder, weights, MODEL, dtype=dtype, overwrite=True)
        return VllmEngine(VllmOptions(model_dir=str(folder), max_slots=16, max_context_tokens=2 * LENGTH, dtype=dtype))
    from rose_jax.jetstream.config import JetStreamConfig
    from rose_jax.jetstream.engine import JetStreamEngine

    config = JetStreamConfig(max_slots=16, max_context_tokens=2 * LENGTH, max_top_logprobs=MODEL.vocab_size)
    return JetStreamEngine(config, MODEL, weights, version=0)


def rows_of(dtype: str, scores: dict[str, np.ndarray]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for one, other in itertools.combinations(scores, 2):
        gap = np.abs(scores[one] - scores[other])
        values = {"mean": gap.mean(), "p99": np.percentile(gap, 99), "max": gap.max()}
        rows.append(
            {"dtype": dtype, "pair": f"{one} - {other}", "tokens": gap.size} | {name: float(v) for name, v in values.items()}
        )
    return rows


def main() -> None:
    params = nnx.state(create_model(MODEL, seed=0, embedding_init_std=EMBEDDING_STD))
    token_ids = np.random.default_rng(0).integers(0, MODEL.vocab_size, (_PROMPTS.value, LENGTH))
    rows: list[dict[str, object]] = []
    for dtype in DTYPES:
        weights = cast_weights(params, weights_dtype=dtype, compute_dtype=dtype)
        scores = {"learner": learner_logprobs(weights, token_ids)[:, FIRST_SCORED:]}
        for name in _ENGINES.value:
            with tempfile.TemporaryDirectory() as folder:
                engine = make_engine(name, weights, dtype, Path(folder) / "model")
                scores[name] = engine_logprobs(engine, token_ids)
                engine.close()
        rows += rows_of(dtype, scores)
    for row in rows:
        print("  ".join(f"{value:.2e}" if isinstance(value, float) else str(value) for value in row.values()), flush=True)
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    entry.run(main)
