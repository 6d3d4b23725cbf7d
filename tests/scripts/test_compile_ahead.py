"""The update compiles from shapes alone, and the memory it reports is what shapes and dtypes say."""

import dataclasses
import math
import os
import re
import subprocess
import sys

import pytest

from common.config import MeshConfig
from rose_jax.models.checkpoint_table import tensor_entries
from rose_jax.models.qwen3_config import Qwen3Config
from scripts.compile_ahead import GIB, MODELS, compile_ahead, training_config

SMALL = dataclasses.replace(
    MODELS["qwen3_8b"], vocab_size=4096, hidden_size=256, num_layers=1, num_heads=8, head_dim=32, intermediate_size=512
)


def num_parameters(config: Qwen3Config) -> int:
    return sum(math.prod(entry.shape) for entry in tensor_entries(config))


def test_the_presets_have_the_published_number_of_parameters() -> None:
    assert num_parameters(MODELS["qwen3_8b"]) == 8_190_735_360
    assert num_parameters(MODELS["qwen3_32b"]) == 32_762_123_264


@pytest.mark.parametrize(("fsdp", "tensor"), [(2, 4), pytest.param(8, 1, marks=pytest.mark.slow)])
def test_each_device_holds_an_eighth_of_weights_and_moments_and_updates_them_in_place(fsdp: int, tensor: int) -> None:
    config = training_config(MeshConfig(fsdp=fsdp, tensor=tensor), None)
    report = compile_ahead(config, SMALL, num_rows=8, num_tokens=128)
    bytes_per_parameter = 3 * 4  # master, two moments
    assert report.argument_bytes == pytest.approx(bytes_per_parameter * num_parameters(SMALL) / 8, rel=0.02)
    assert report.fresh_output_bytes < 10_000
    assert 0 < report.temporary_bytes < 64 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize(("fsdp", "tensor"), [(8, 1), (2, 4)])
def test_qwen3_8b_compiles_on_eight_fake_devices_and_fits_into_80_gib(fsdp: int, tensor: int) -> None:
    command = [sys.executable, "-m", "scripts.compile_ahead", "--model=qwen3_8b", f"--fsdp={fsdp}", f"--tensor={tensor}"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = {
        name.strip(): float(size) for name, size in re.findall(r"^  (\D+?) +([\d.]+) GiB per device$", done.stdout, re.MULTILINE)
    }
    assert sizes["weights, optimizer, batch"] == pytest.approx(12 * num_parameters(MODELS["qwen3_8b"]) / 8 / GIB, rel=0.01)
    assert sizes["together"] < 80


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_with_the_fix() -> None:
    command = [sys.executable, "-m", "scripts.compile_ahead", "--fsdp=8", "--batch=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--batch=12 is not divisible by 8" in done.stderr
    assert "use 16" in done.stderr
