"""The plugin as vLLM finds it: an installed entry point, loaded in every process vLLM starts, workers included."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rose_gpu.vllm.environment import IN_PLACE_VARIABLE, installed_vllm
from tests.rose_gpu.vllm.small_models import checkpoint

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """\
import sys
from vllm import LLM

def sizes(worker):
    return {name: param.numel() for name, param in worker.model_runner.get_model().named_parameters()}

if __name__ == "__main__":
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=2, block_size=32,
              kv_cache_memory_bytes=1 << 22, distributed_executor_backend="mp")
    print("SIZES", llm.llm_engine.collective_rpc(sizes)[0]["model.layers.0.self_attn.qkv_proj.weight"])
"""
"""vLLM as anybody starts it, with its worker in a process of its own; of this project it knows only what is installed."""


def install(folder: Path) -> None:
    """What `pip install` of this project leaves behind for vLLM to find."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    info = folder / "rose-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rose\nVersion: 0.1.0\n")
    lines = [line.strip() for line in setup["options.entry_points"]["vllm.general_plugins"].splitlines() if line.strip()]
    (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_a_worker_of_plain_vllm_keeps_weights_in_place_if_it_is_told_to(tmp_path: Path, in_place: bool) -> None:
    install(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", IN_PLACE_VARIABLE)}
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `sizes` is sent to the worker as a function
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if in_place:
        environment[IN_PLACE_VARIABLE] = "1"
    ran = subprocess.run(
        [sys.executable, str(program), checkpoint(0)], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    num_elements = int(ran.stdout.split("SIZES")[1].split()[0])
    assert (num_elements > 0) == in_place, f"qkv_proj.weight has {num_elements} elements in the worker"


def test_without_the_variable_the_plugin_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    from rose_gpu.vllm import plugin

    packing = object()
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", packing)
    monkeypatch.delenv(IN_PLACE_VARIABLE, raising=False)
    plugin.register()
    assert utils.dispatch_cpu_unquantized_gemm is packing
    monkeypatch.setenv(IN_PLACE_VARIABLE, "1")
    plugin.register()
    assert utils.dispatch_cpu_unquantized_gemm is plugin._use_parameter
