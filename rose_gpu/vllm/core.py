"""vLLM's engine core as we use it: with our scheduler and our workers' extension, opened and shut down in one process.

All cores of a process share its process groups, so those go with the last one. Imports vLLM when called, not before.
"""

from __future__ import annotations

from typing import Any

from rose_gpu.vllm.options import VllmOptions

_open_cores: list[Any] = []


def open_core(options: VllmOptions) -> tuple[Any, str | None]:
    """vLLM's engine core with our scheduler and sampler, and the name of its workers' shared memory.

    Raises:
        ValueError: an option that does not fit machine or model, or weights that cannot be updated in place.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = EngineArgs(**options.engine_arguments()).create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    _open_cores.append(core)
    try:
        shared_memory = core.collective_rpc("install_rose", args=(options.arriving_dtype,))[0]
    except BaseException:
        shut_down(core)
        raise
    return core, shared_memory


def shut_down(core: Any) -> None:
    """Shut a core down; the process groups, which all cores of this process share, go with the last one."""
    _open_cores.remove(core)
    if _open_cores:
        core.model_executor.shutdown()
        core.scheduler.shutdown()
    else:
        core.shutdown()


def describe_ended_workers(core: Any) -> str:
    """Which worker processes have ended, and how; empty if none has, or if there are none. vLLM's own error does not say."""
    handles = getattr(core.model_executor, "workers", None) or []
    codes = {handle.rank: handle.proc.exitcode for handle in handles if handle.proc.exitcode is not None}
    return f" (exit codes of worker processes, by rank: {codes})" if codes else ""
