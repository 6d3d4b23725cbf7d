"""The processes of a co-serving benchmark as it sees them: started, pinned, told what to do, and never left behind.

A device process (core 0) and its front (core 1) share a socket pair; the benchmark (core 1) has another to the device. Closing it
ends the device, and with it the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from common.errors import EngineClosedError
from common.serving.front.channel import Channel, ChannelClosedError
from scripts.entry import ROOT

DEVICE_CORE, CLIENT_CORE = 0, 1
START_TIMEOUT_S = 600.0
"""Engines compile or import for tens of seconds."""
END_TIMEOUT_S = 20.0
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "TORCHDYNAMO_DISABLE": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""One core cannot run more, and threads that take turns on it only add noise."""


class Process:
    """One of the benchmark's processes, with a control channel if it has one. Use as `async with`.

    Programs that JAX compiled are shared by all of a run, or of many runs where JAX_COMPILATION_CACHE_DIR is set.
    """

    def __init__(self, module: str, arguments: Sequence[str], log: Path, *, fds: dict[str, socket.socket] | None = None) -> None:
        self._module, self._arguments, self._log, self._fds = module, list(arguments), log, dict(fds or {})
        self._process: asyncio.subprocess.Process | None = None
        self.channel: Channel | None = None

    async def __aenter__(self) -> Process:
        passed = {name: end.fileno() for name, end in self._fds.items()}
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(self._log.parent / "compiled")}
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                *self._arguments,
                *(f"--{name}={number}" for name, number in passed.items()),
                pass_fds=list(passed.values()),
                env=compiled | os.environ | ONE_THREAD | {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        for end in self._fds.values():
            end.close()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        if self.channel is not None:
            await self.channel.close()
        else:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def ask(self, kind: str, *, timeout_s: float = 120.0, **fields: Any) -> dict[str, Any]:
        """The answer to a message of the control channel."""
        assert self.channel is not None
        self.channel.send({"kind": kind, **fields})
        return await self.answer(timeout_s)

    async def answer(self, timeout_s: float) -> dict[str, Any]:
        """Raises EngineClosedError with the end of its log if the process fails first or says nothing for too long."""
        assert self.channel is not None
        try:
            message = await asyncio.wait_for(self.channel.receive(), timeout_s)
        except (ChannelClosedError, TimeoutError) as error:
            said = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise EngineClosedError(f"{self._module} ended or said nothing for {timeout_s:.0f} s; it last said:\n{said}") from error
        if message["kind"] == "failed":
            raise EngineClosedError(message["text"])
        return message


class CoServed:
    """A device (`side`: both engines, or a stock one) and its front, ready for calls at `url`. Use as `async with`."""

    def __init__(self, backend: str, folder: Path, *, vocab_size: int, side: str = "both") -> None:
        self._backend, self._folder, self._vocab_size, self._side = backend, folder, vocab_size, side
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> CoServed:
        try:
            ours, theirs = socket.socketpair()
            front_end, engine_end = socket.socketpair()
            arguments = [*device_arguments(self._backend, self._folder, self._vocab_size), f"--side={self._side}"]
            fds = {"control_fd": theirs, "front_fd": engine_end}
            self.device = Process("scripts.coserving_device", arguments, self._folder / f"{self._side}.log", fds=fds)
            await self._stack.enter_async_context(self.device)
            self.device.channel = await Channel.over(ours)
            ready = self._folder / f"{self._side}.ready"
            front_arguments = [f"--core={CLIENT_CORE}", f"--ready_file={ready}"]
            log = self._folder / f"{self._side}.front.log"
            front = Process("scripts.coserving_front", front_arguments, log, fds={"engine_fd": front_end})
            await self._stack.enter_async_context(front)
            await self.device.answer(START_TIMEOUT_S)
            for _ in range(int(10 * START_TIMEOUT_S)):
                if ready.exists():
                    self.url = ready.read_text()
                    return self
                await asyncio.sleep(0.1)
            raise EngineClosedError(f"the front is not ready; see {log}")
        except BaseException:
            await self._stack.aclose()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()


@contextlib.asynccontextmanager
async def idle_rollouts(backend: str, folder: Path, *, vocab_size: int) -> Any:
    """The process of the sched_idle variant: the rollout engine alone on the device's core, when nobody else wants it."""
    ours, theirs = socket.socketpair()
    arguments = [*device_arguments(backend, folder, vocab_size), "--side=rollout"]
    process = Process("scripts.coserving_device", arguments, folder / "idle.log", fds={"control_fd": theirs})
    async with process:
        process.channel = await Channel.over(ours)
        await process.answer(START_TIMEOUT_S)
        yield process


def device_arguments(backend: str, folder: Path, vocab_size: int) -> list[str]:
    return [f"--backend={backend}", f"--core={DEVICE_CORE}", f"--models={folder}", f"--vocab_size={vocab_size}"]
