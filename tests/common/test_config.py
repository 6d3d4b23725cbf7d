"""Configurations are checked once, early, and errors say both numbers and the fix."""

import importlib
import pkgutil
import re
import subprocess
import sys

import pytest

import configs
from common.config import Config, validate

CONFIG_NAMES = [module.name for module in pkgutil.iter_modules(configs.__path__)]


@pytest.mark.parametrize("name", CONFIG_NAMES)
def test_every_config_file_is_valid_and_documented(name: str) -> None:
    module = importlib.import_module(f"configs.{name}")
    validate(module.get_config())
    for word in ("Hardware:", "Duration:", "Expected", "Command:"):
        assert word in module.__doc__, f"configs/{name}.py: its docstring says nothing of {word}"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("grpo.group_size", 1, ["grpo.group_size=1", "at least 2"]),
        ("grpo.num_minibatches", 3, ["64 trajectories", "num_minibatches=3", "not divisible by 3"]),
        ("grpo.aggregation", "mean", ["grpo.aggregation='mean'", "token, sequence, constant"]),
        ("grpo.clip_low", 1.5, ["grpo.clip_low=1.5"]),
        ("model.num_kv_heads", 4, ["model.num_heads=2", "model.num_kv_heads=4"]),
        ("model.head_dim", 33, ["model.head_dim=33", "even"]),
        ("model.weights_dtype", "int8", ["model.weights_dtype='int8'", "float32, bfloat16"]),
        ("sampler.max_context_tokens", 4096, ["4096", "model.max_position_embeddings=1024"]),
        ("sampler.backend", "sglang", ["sampler.backend='sglang'", "jetstream, vllm"]),
        ("sampler.tensor_parallel", 2, ["sampler.tensor_parallel=2", "sampler.backend='vllm'"]),
        ("sampler.max_turn_tokens", 500, ["sampler.max_turn_tokens=500", "sampler.max_context_tokens="]),
        ("warmup.random_action_share", 1.5, ["warmup.random_action_share=1.5"]),
        ("optim.schedule", "step", ["optim.schedule='step'", "cosine"]),
        ("optim.b2", 1.0, ["optim.b2=1.0"]),
        ("env.turn_timeout_s", 0.0, ["env.turn_timeout_s=0.0"]),
        ("checkpoint.keep", 0, ["checkpoint.keep=0"]),
    ],
)
def test_a_bad_value_is_named_with_the_fix(field: str, value: object, words: list[str]) -> None:
    config = Config()
    section, name = field.split(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        validate(config)
    for word in words:
        assert word in str(error.value)


def test_a_mistyped_flag_fails_and_names_the_field(tmp_path: object) -> None:
    command = [sys.executable, "-m", "scripts.train", "--config=configs/frozenlake_cpu.py", f"--workdir={tmp_path}/run"]
    done = subprocess.run([*command, "--config.optim.learning_rate=1"], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "learning_rate" in done.stderr
