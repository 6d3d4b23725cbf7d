"""Options that this machine does not have are refused by name before vLLM starts anything."""

from __future__ import annotations

import pytest

from rose_gpu.vllm.environment import installed_vllm
from rose_gpu.vllm.options import VllmOptions
from tests.rose_gpu.vllm.small_models import checkpoint

NEEDS_VLLM = pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed: see requirements/serve-cpu.txt")


@NEEDS_VLLM
@pytest.mark.parametrize("option", ["cuda_graphs", "sleep_mode", "kvcached"])
@pytest.mark.parametrize("form", ["in process", pytest.param("worker group", marks=pytest.mark.slow)])
def test_an_option_of_cuda_is_refused_by_name_elsewhere(option: str, form: str) -> None:
    from vllm.platforms import current_platform

    from rose_gpu.vllm.engine import VllmEngine
    from rose_gpu.vllm.group import WorkerGroup

    if current_platform.is_cuda():
        pytest.skip("CUDA has these options")
    options = VllmOptions(model_dir=checkpoint(0), max_slots=2, max_context_tokens=64, **{option: True})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"{option}=True needs CUDA, but vllm.* runs on cpu; leave it off"):
        (VllmEngine if form == "in process" else WorkerGroup)(options)


@NEEDS_VLLM
def test_a_model_that_vllm_on_cpu_cannot_run_is_refused_with_its_number() -> None:
    options = VllmOptions(model_dir=checkpoint(0, head_dim=16), max_slots=2, max_context_tokens=64)
    with pytest.raises(ValueError, match="head_dim=16, but attention of vLLM on CPU needs at least 32"):
        options.engine_arguments()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_slots": 0}, "max_slots=0 must be at least 1"),
        ({"block_tokens": 0}, "block_tokens=0 and tensor_parallel=1 must be at least 1"),
        ({"tensor_parallel": 0}, "block_tokens=32 and tensor_parallel=0 must be at least 1"),
        ({"max_step_tokens": 1}, "max_step_tokens=1 has no room for one token of each of 2 slots"),
        ({"dtype": "int8"}, "dtype='int8' is unknown"),
        ({"dtype": "bfloat16", "published_dtype": "float32"}, "published_dtype=float32 would be rounded to dtype=bfloat16"),
        ({"cache_tokens": 32}, "cache_tokens=32 cannot hold one request of max_context_tokens=64"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(wrong: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        VllmOptions(**{"model_dir": "model", "max_slots": 2, "max_context_tokens": 64, **wrong})
