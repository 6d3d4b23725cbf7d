"""A parked vLLM engine: its memory goes, its weights can be read, and it comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rose_gpu.vllm.environment import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.target import VllmWeightTarget
from tests.common.serving.test_parking import anonymous_bytes
from tests.rose_gpu.vllm.small_models import tensors, write_checkpoint
from tests.rose_gpu.vllm.test_weights import distribution, parameters

LARGER = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024}


def test_memory_goes_weights_stay_readable_and_nothing_changes(tmp_path: Path) -> None:
    weights = tensors(0, **LARGER)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    engine = VllmEngine(VllmOptions(model_dir=write_checkpoint(tmp_path, weights, **LARGER), max_slots=4, max_context_tokens=64))
    try:
        target, positions = VllmWeightTarget(engine), np.arange(1000, dtype=np.uint64)
        before, bits = distribution(engine), parameters(engine)
        for _ in range(2):
            held = anonymous_bytes()  # now: what was compared is freed, and may still be this process's
            assert sum(1 for _ in engine.park()) >= num_bytes // (4 << 20)
            assert anonymous_bytes() <= held - 0.9 * num_bytes
            np.testing.assert_array_equal(
                target.read("model.embed_tokens.weight", positions).view(np.float32),
                weights["model.embed_tokens.weight"].reshape(-1)[:1000],
            )
            assert sum(1 for _ in engine.activate()) >= num_bytes // (4 << 20)
            assert parameters(engine) == bits
            assert distribution(engine) == before
    finally:
        engine.close()
