"""What co-serving replicas need of a configuration is checked before anything starts; errors name field, value and fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.config import Config, ReplicaConfig, serving_config, validate
from common.traffic.online import online_trace
from configs import coserve_cpu
from scripts.traffic import OnlineTraffic


def set_field(config: Config, field: str, value: Any) -> None:
    *path, name = field.split(".")
    holder: Any = config
    for part in path:
        holder = getattr(holder, part)
    setattr(holder, name, value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("coserving.ttft_s", 0.0, ["coserving.ttft_s=0.0", "greater than 0"]),
        ("coserving.tpot_s", -0.1, ["coserving.tpot_s=-0.1", "greater than 0"]),
        ("coserving.step_share", 1.5, ["coserving.step_share=1.5", "(0, 1]"]),
        ("coserving.max_tpot_rise", 0.5, ["coserving.max_tpot_rise=0.5", "at least 1"]),
        ("coserving.park_after_s", 0.0, ["coserving.park_after_s=0.0"]),
        ("coserving.traffic.prompts", 0.0, ["coserving.traffic.prompts=0.0"]),
        ("coserving.traffic.end_s", 0.0, ["coserving.traffic.start_s=0.0", "below end_s=0.0"]),
        ("coserving.model.head_dim", 33, ["of the serving model", "model.head_dim=33"]),
        ("coserving.sampler.max_context_tokens", 4096, ["of the serving model", "sampler.max_context_tokens=4096"]),
    ],
)
def test_a_bad_value_is_named_with_the_fix(field: str, value: Any, words: list[str]) -> None:
    config = coserve_cpu.get_config()
    set_field(config, field, value)
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        validate(config)
    for word in words:
        assert word in str(error.value)


def test_nothing_is_asked_of_a_run_without_a_coserving_replica(tmp_path: Path) -> None:
    config = Config()
    config.coserving.ttft_s = 0.0
    config.coserving.traffic.trace = "nowhere.csv"
    validate(config)
    traffic = OnlineTraffic(config, tmp_path)
    traffic.start()
    assert traffic.stop() == []
    assert list(tmp_path.iterdir()) == []


def test_two_models_on_several_ranks_are_refused() -> None:
    config = Config()
    config.fleet.replicas.append(ReplicaConfig(name="both", backend="vllm", tensor_parallel=2, coserve=True))
    with pytest.raises(ValueError, match=r"fleet.replicas\[0\].tensor_parallel=2 is not possible with coserve=True"):
        validate(config)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("trace", "azure2024_code", ["'azure2024_code' is no file", "azure2023_conv_pub"]),
        ("start_s", 1e6, ["nothing of azure2023_conv_pub arrives from 1e+06"]),
        ("prompts", 5.0, ["max_context_tokens=384", "lower coserving.traffic.prompts or outputs"]),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_with_the_fix(tmp_path: Path, field: str, value: Any, words: list[str]) -> None:
    config = coserve_cpu.get_config()
    setattr(config.coserving.traffic, field, value)
    config.coserving.traffic.end_s += config.coserving.traffic.start_s
    with pytest.raises(ValueError, match=r"coserving\.traffic") as error:
        OnlineTraffic(config, tmp_path)
    for word in words:
        assert word in str(error.value)


def test_the_serving_model_is_another_one_on_the_same_backend() -> None:
    config = coserve_cpu.get_config()
    config.sampler.backend = "vllm"
    serving = serving_config(config)
    assert serving.model is config.coserving.model
    assert serving.sampler.backend == "vllm"
    assert serving.seed != config.seed
    assert config.coserving.sampler.backend == "jetstream"
    assert serving.fleet.replicas == []


def test_the_slice_of_the_configuration_fits_the_serving_model() -> None:
    config = coserve_cpu.get_config()
    trace = online_trace(config)
    assert len(trace.requests) > 100
    assert trace.longest_context <= config.coserving.sampler.max_context_tokens
