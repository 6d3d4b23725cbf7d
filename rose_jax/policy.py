"""The policy a run starts from: read from a Hugging Face folder, or made new in the shape the config gives.

A new model's vocabulary is the environment's own words, so that a small model is small. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from common.config import Config
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import TaskSuite
from rose_jax.export import load_checkpoint, load_config
from rose_jax.models.qwen3 import create_model
from rose_jax.models.qwen3_config import Qwen3Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """A model's configuration, float32 parameters and the tokenizer that belongs to it."""

    model_config: Qwen3Config
    params: nnx.State
    chat: ChatTokenizer


def build_policy(config: Config, suite: TaskSuite, mesh: Mesh) -> Policy:
    """Load `model.checkpoint`, or make a model from `seed`.

    Raises:
        CheckpointError: the folder cannot be used.
        ValueError: the context the sampler is configured for exceeds the model's, or the tokenizer is another model's.
    """
    model = config.model
    if model.checkpoint is not None:
        folder = Path(model.checkpoint)
        model_config = load_config(folder)  # the small files first: an error in them should not wait for all weights
        chat = ChatTokenizer.load(folder)
        if chat.vocab_size > model_config.vocab_size:
            raise ValueError(
                f"the tokenizer in {folder} has {chat.vocab_size} tokens, the model's vocabulary {model_config.vocab_size}; "
                "put the tokenizer there that the model was trained with"
            )
        if config.sampler.max_context_tokens > model_config.max_position_embeddings:
            raise ValueError(
                f"sampler.max_context_tokens={config.sampler.max_context_tokens} is above the "
                f"{model_config.max_position_embeddings} positions of {folder}; lower it"
            )
        _, params = load_checkpoint(folder, mesh=mesh)
        return Policy(model_config=model_config, params=params, chat=chat)
    chat = ChatTokenizer.from_vocabulary(suite.vocabulary())
    model_config = Qwen3Config(
        vocab_size=chat.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        intermediate_size=model.intermediate_size,
        tie_word_embeddings=model.tie_word_embeddings,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
        max_position_embeddings=model.max_position_embeddings,
        pad_token_id=chat.pad_token_id,
        eos_token_id=chat.stop_token_ids[0],
    )
    new_model = create_model(model_config, seed=config.seed, mesh=mesh, embedding_init_std=model.embedding_init_std)
    return Policy(model_config=model_config, params=nnx.state(new_model), chat=chat)
