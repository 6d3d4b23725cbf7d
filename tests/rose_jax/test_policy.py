"""The policy a run starts from: new from the seed, or exactly what a folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from common.config import Config
from common.errors import CheckpointError
from common.rollout.environment import load_task_suite
from rose_jax.export import save_checkpoint
from rose_jax.mesh import make_mesh
from rose_jax.policy import Policy, build_policy


def small_config() -> Config:
    config = Config()
    config.model.num_layers = 1
    return config


def built(config: Config) -> Policy:
    suite = load_task_suite(config.env.factory, {"size": 3, "num_train": 20, "num_validation": 2, "num_held_out": 5})
    return build_policy(config, suite, make_mesh(config.mesh))


def bits(params: nnx.State) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy saved as a run saves it."""
    folder = tmp_path_factory.mktemp("policy") / "model"
    policy = built(small_config())
    save_checkpoint(folder, policy.params, policy.model_config, dtype="float32", save_tokenizer=policy.chat.save)
    return folder


def test_a_new_policy_follows_from_the_seed_and_the_shape_in_the_configuration() -> None:
    config = small_config()
    first, again = built(config), built(config)
    assert bits(first.params) == bits(again.params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(first.params)} == {"float32"}
    assert first.model_config.vocab_size == first.chat.vocab_size
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
        assert getattr(first.model_config, name) == getattr(config.model, name)
    config.seed = 1
    assert bits(built(config).params) != bits(first.params)


def test_what_was_saved_is_what_a_run_starts_from(folder: Path) -> None:
    saved = built(small_config())
    config = small_config()
    config.model.checkpoint = str(folder)
    config.model.num_layers = 7  # the folder's own shape counts
    loaded = built(config)
    assert bits(loaded.params) == bits(saved.params)
    assert loaded.model_config == saved.model_config
    assert loaded.chat.encode_prompt(None, "S F G") == saved.chat.encode_prompt(None, "S F G")


def test_a_context_longer_than_the_models_is_refused_with_both_numbers(folder: Path) -> None:
    config = small_config()
    config.model.checkpoint = str(folder)
    config.sampler.max_context_tokens = 2000
    with pytest.raises(ValueError, match=r"max_context_tokens=2000 is above the 1024 positions of .*; lower it"):
        built(config)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    config = small_config()
    config.model.checkpoint = str(tmp_path / "nosuch")
    with pytest.raises(CheckpointError, match="nosuch is missing"):
        built(config)


def test_another_models_tokenizer_is_refused_before_weights_are_read(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    fields = json.loads((folder / "config.json").read_text())
    vocab_size = fields["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"vocab_size": vocab_size - 1}))
    config = small_config()
    config.model.checkpoint = str(tmp_path)
    with pytest.raises(ValueError, match=rf"has {vocab_size} tokens, the model's vocabulary {vocab_size - 1}; put"):
        built(config)
