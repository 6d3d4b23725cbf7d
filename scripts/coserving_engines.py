"""The two engines of a co-serving benchmark: a serving and a rollout model of about 5M parameters each, on one backend.

Both are random: speed does not depend on what weights say. Steps of serving are bounded alike in every variant.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from common.clock import MonotonicClock
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import load_task_suite
from common.serving.coserving.emulated import EmulatedEngine
from common.serving.coserving.events import Side
from common.serving.coserving.step_time import StepFeatures
from common.serving.engine import StepEngine
from common.serving.fake import StepTiming
from common.transfer.target import NumpyTarget, WeightTarget

BACKENDS = ("jetstream", "vllm", "emulated")
"""emulated: engines that sleep as long as a step would take, for trying the benchmark itself."""
MODEL = {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "intermediate_size": 768}
"""5.1M parameters besides the embedding."""
TURN_TOKENS = 8
"""Page and tile of the JetStream engines: a turn adds about as many. What fills no page is computed again, no tile for nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Of one engine. `max_step_tokens` bounds its steps: an arrival may have to wait for a whole one."""

    max_slots: int
    max_context_tokens: int
    max_step_tokens: int


SHAPES = {
    Side.SERVING: Shape(max_slots=32, max_context_tokens=2048, max_step_tokens=256),
    Side.ROLLOUT: Shape(max_slots=64, max_context_tokens=512, max_step_tokens=1024),
}


def longest_serving_step() -> StepFeatures:
    shape = SHAPES[Side.SERVING]
    return StepFeatures(
        prefill_tokens=shape.max_step_tokens - shape.max_slots // 4,
        decode_tokens=shape.max_slots // 4,
        context_tokens=shape.max_slots // 4 * shape.max_context_tokens // 4,
        switched=True,
    )


def tokenizer() -> ChatTokenizer:
    """Words of the environment whose lengths the rollouts have."""
    from configs import frozenlake_mixed_cpu

    env = frozenlake_mixed_cpu.get_config().env
    return ChatTokenizer.from_vocabulary(load_task_suite(env.factory, env.options).vocabulary())


def _model_config(vocab_size: int) -> Any:
    from rose_jax.models.qwen3_config import Qwen3Config

    return Qwen3Config(
        vocab_size=vocab_size,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=SHAPES[Side.SERVING].max_context_tokens,
        pad_token_id=0,
        eos_token_id=1,
        **MODEL,
    )


def write_model(folder: Path, *, vocab_size: int, seed: int) -> None:
    """A random model as a Hugging Face folder, for vLLM."""
    from flax import nnx

    from rose_jax.export import save_checkpoint
    from rose_jax.models.qwen3 import create_model

    config = _model_config(vocab_size)
    params = nnx.state(create_model(config, seed=seed, embedding_init_std=0.125))
    save_checkpoint(folder, params, config, dtype="float32")


def build(backend: str, side: Side, *, vocab_size: int, folder: Path) -> tuple[StepEngine[Any], WeightTarget]:
    """An engine, ready to step, and its weights as the transfer layer sees them. `folder`: where vLLM reads its model from."""
    match backend:
        case "jetstream":
            return _jetstream(side, vocab_size)
        case "vllm":
            return _vllm(side, folder)
        case _:
            return _emulated(side, vocab_size)


class SleepingClock(MonotonicClock):
    """Real time, in which a step is waited for."""

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


def _emulated(side: Side, vocab_size: int) -> tuple[StepEngine[Any], WeightTarget]:
    shape = SHAPES[side]
    engine = EmulatedEngine(
        StepTiming().duration_s,
        SleepingClock(),
        max_slots=shape.max_slots,
        max_context_tokens=shape.max_context_tokens,
        block_tokens=16,
        vocab_size=vocab_size,
        name=f"emulated-{side}",
    )
    return engine, PublishedArrays({"weight": np.zeros(16, np.float32)})


class PublishedArrays(NumpyTarget):
    """A target whose arrays can be asked for."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(arrays)
        self._arrays = arrays

    def published(self, name: str) -> np.ndarray:
        return self._arrays[name]


def _jetstream(side: Side, vocab_size: int) -> tuple[StepEngine[Any], WeightTarget]:
    from flax import nnx

    from rose_jax.jetstream.config import JetStreamConfig
    from rose_jax.jetstream.engine import JetStreamEngine
    from rose_jax.models.qwen3 import create_model
    from rose_jax.weight_target import JaxWeightTarget

    shape, model_config = SHAPES[side], _model_config(vocab_size)
    params = nnx.state(create_model(model_config, seed=list(Side).index(side), embedding_init_std=0.125))
    config = JetStreamConfig(
        max_slots=shape.max_slots,
        max_context_tokens=shape.max_context_tokens,
        page_tokens=TURN_TOKENS,
        tile_tokens=TURN_TOKENS,
        max_prefill_tiles=shape.max_step_tokens // TURN_TOKENS,
        max_step_draws=1,
        row_buckets=(shape.max_slots // 4, shape.max_slots // 2, shape.max_slots),
        tile_buckets=tuple(shape.max_step_tokens // TURN_TOKENS * parts // 16 for parts in (1, 2, 4, 8, 12, 16)),
        context_buckets=tuple(shape.max_context_tokens * parts // 16 for parts in (1, 4, 16))
        if side is Side.SERVING
        else tuple(shape.max_context_tokens * parts // 4 for parts in (1, 2, 4)),
    )
    engine = JetStreamEngine(config, model_config, params, version=0, name=f"jetstream-{side}")
    engine.warm_up()
    return engine, JaxWeightTarget(engine, model_config, params, weights_dtype="float32")


def _vllm(side: Side, folder: Path) -> tuple[StepEngine[Any], WeightTarget]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from rose_gpu.vllm.engine import VllmEngine
    from rose_gpu.vllm.options import VllmOptions
    from rose_gpu.vllm.target import VllmWeightTarget

    shape = SHAPES[side]
    options = VllmOptions(
        model_dir=str(folder),
        max_slots=shape.max_slots,
        max_context_tokens=shape.max_context_tokens,
        max_step_tokens=shape.max_step_tokens,
        name=f"vllm-{side}",
    )
    engine = VllmEngine(options)
    return engine, VllmWeightTarget(engine)
