"""Small models and trajectories that the learner's tests share."""

import numpy as np
from flax import nnx

from common.config import Config, MeshConfig
from common.types import EpisodeEnd, Group, Split, Task, Trajectory
from rose_jax.advantages import score_groups
from rose_jax.batching import Batch, rl_batch
from rose_jax.learner import Learner
from rose_jax.mesh import make_mesh
from rose_jax.models.qwen3 import create_model
from rose_jax.models.qwen3_config import Qwen3Config

TASK = Task(task_id="train/0", split=Split.TRAIN, spec="")
MODEL_CONFIG = Qwen3Config(
    vocab_size=48,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    tie_word_embeddings=True,
    rope_theta=10_000.0,
)


def small_config(**grpo: object) -> Config:
    """A configuration with 4 prompts x 4 trajectories and no warm-up; keyword arguments set fields of `grpo`."""
    config = Config()
    config.warmup.num_updates = 0
    config.grpo.prompts_per_step = 4
    config.grpo.group_size = 4
    config.model.logprob_chunk_tokens = 64
    config.optim.lr = 1e-3
    for name, value in grpo.items():
        assert hasattr(config.grpo, name), name
        setattr(config.grpo, name, value)
    return config


def new_params(seed: int = 0, model_config: Qwen3Config = MODEL_CONFIG) -> nnx.State:
    """Fresh float32 weights."""
    return nnx.state(create_model(model_config, seed=seed, embedding_init_std=0.125))


def new_learner(config: Config, *, fsdp: int = 1, tensor: int = 1, model_config: Qwen3Config = MODEL_CONFIG) -> Learner:
    """A learner on a mesh of fake devices, with the same initial weights each time."""
    config.mesh = MeshConfig(fsdp=fsdp, tensor=tensor)
    return Learner(config, model_config, make_mesh(config.mesh), new_params(model_config=model_config))


def trajectory(
    length: int, *, reward: float = 0.0, seed: int = 0, end: EpisodeEnd = EpisodeEnd.DONE, has_loss: bool = True
) -> Trajectory:
    """Random tokens; turns of three agent tokens alternate with four of observation, the first of which is a prompt."""
    rng = np.random.default_rng([seed, length])
    loss_mask = (np.arange(length) % 7 >= 4) & has_loss
    logprobs = np.where(loss_mask, -np.abs(rng.normal(2.5, 0.8, length)), 0).astype(np.float32)
    return Trajectory(
        trajectory_id=seed,
        group_id=0,
        task=TASK,
        token_ids=rng.integers(1, 48, length).astype(np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        weight_versions=np.zeros(length, np.int32),
        reward=reward,
        success=reward > 0,
        end=end,
        turns=(),
    )


def groups(num_groups: int = 4, group_size: int = 4, seed: int = 0) -> list[Group]:
    """Groups of trajectories of different lengths with rewards 0 or 1 drawn at random."""
    rng = np.random.default_rng(seed)
    return [
        Group(
            group_id=group_id,
            task=TASK,
            trajectories=tuple(
                trajectory(int(rng.integers(12, 60)), reward=float(rng.integers(2)), seed=1000 * seed + group_id * group_size + idx)
                for idx in range(group_size)
            ),
        )
        for group_id in range(num_groups)
    ]


def scored_batch(seed: int = 0) -> Batch:
    """The batch of `groups(seed=seed)`."""
    return rl_batch(score_groups(groups(seed=seed), normalize_std=True))
