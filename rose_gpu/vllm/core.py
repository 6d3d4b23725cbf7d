"""vLLM's engine core as we use it: with our scheduler and our workers' extension, opened and shut down in one process.

All cores of a process share its process groups, so those go with the last one. Imports vLLM when called, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rose_gpu.vllm.options import VllmOptions

SHARED_MEMORY = Path("/dev/shm")
JOIN_TIMEOUT_S = 5.0
"""For a worker that was told to end and has; vLLM does not reap one that died by itself."""

_open_cores: list[Any] = []
_queue_files: dict[int, list[Path]] = {}
"""By id of an open core: the shared memory of its message queues. A worker that is killed leaves its own behind."""


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
    _queue_files[id(core)] = []
    try:
        _queue_files[id(core)] = _files_of_queues(core)
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
    for handle in getattr(core.model_executor, "workers", None) or []:
        handle.proc.join(JOIN_TIMEOUT_S)
    for path in _queue_files.pop(id(core)):
        path.unlink(missing_ok=True)


def _files_of_queues(core: Any) -> list[Path]:
    """Those that workers made; none where the model runs in this process, whose own queue goes by itself."""
    queues = getattr(core.model_executor, "response_mqs", None) or []
    names = [queue.buffer.shared_memory.name for queue in queues if queue.buffer is not None]
    if queues:
        names += [name for name in core.collective_rpc(_name_of_broadcast) if name is not None]
    return [SHARED_MEMORY / name for name in names]


def _name_of_broadcast(_worker: Any) -> str | None:
    """Runs in a worker: the shared memory of its tensor-parallel group's queue, which rank 0 makes."""
    from vllm.distributed.parallel_state import get_tp_group

    queue = get_tp_group().mq_broadcaster
    return None if queue is None or queue.buffer is None else queue.buffer.shared_memory.name


def describe_ended_workers(core: Any) -> str:
    """Which worker processes have ended, and how; empty if none has, or if there are none. vLLM's own error does not say."""
    handles = getattr(core.model_executor, "workers", None) or []
    codes = {handle.rank: handle.proc.exitcode for handle in handles if handle.proc.exitcode is not None}
    return f" (exit codes of worker processes, by rank: {codes})" if codes else ""
