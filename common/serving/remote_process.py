"""Where remote replicas are: a process that is started here, or an address where one runs already. Both are Origins.

A process writes everything to one log file, of which the last lines are kept for whoever must be told why it ended. It is asked to
end by SIGTERM, then made to. Invariant: it does not outlive this process, however that ends, if its command honours --owner_pid as
`end_with_owner` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from common.errors import EngineClosedError, ReplicaUnavailableError, RoseError
from common.serving.remote import RemoteReplica

POLL_S = 0.05
ATTACH_PAUSE_S = 1.0
"""Between two looks at an address where a replica was, which others may be starting again."""
STOP_S = 10.0
"""For what is under way after a first SIGTERM, and again after a second; then the process is killed."""
NUM_LAST_LINES = 30
MAX_TAIL_BYTES = 16 << 10
_PR_SET_PDEATHSIG = 1

Connect = Callable[[str], RemoteReplica]
"""Makes a RemoteReplica, not yet entered, to what listens at an address."""


class ReplicaFailedError(RoseError):
    """A replica that did not come up, or came to an end. `Origin.stop` has its own last lines."""


class Origin(Protocol):
    """Where one replica comes from. Start and stop take turns; `ended` may be awaited in between."""

    @property
    def replica_id(self) -> str: ...

    async def start(self) -> RemoteReplica:
        """Bring it up and return it, entered.

        Raises:
            ReplicaFailedError, AuthenticationError: it did not come up.
        """
        ...

    async def ended(self) -> None:
        """Wait until it is gone by itself, which one at an address never is as far as we know."""
        ...

    async def stop(self) -> str:
        """Let go of it and say how it ended and what it last said. Idempotent."""
        ...


class AttachedReplica:
    """An Origin for a replica that others start and stop.

    Args:
        return_timeout_s: how long one that was there may be away, say to load a model again; its first start waits for nobody.
    """

    def __init__(self, replica_id: str, url: str, connect: Connect, *, return_timeout_s: float = 0.0) -> None:
        self._id, self._url, self._connect, self._return_timeout_s = replica_id, url, connect, return_timeout_s
        self._replica: RemoteReplica | None = None
        self._deadline_s: float | None = None

    @property
    def replica_id(self) -> str:
        return self._id

    async def start(self) -> RemoteReplica:
        while True:
            is_last = self._deadline_s is None or time.monotonic() > self._deadline_s
            try:
                return await self._attach()
            except ReplicaFailedError:
                if is_last:
                    raise
            await asyncio.sleep(ATTACH_PAUSE_S)

    async def _attach(self) -> RemoteReplica:
        replica = self._connect(self._url)
        try:
            await replica.__aenter__()
        except (ReplicaUnavailableError, EngineClosedError) as error:
            raise ReplicaFailedError(str(error)) from None
        if replica.load().draining:
            await replica.__aexit__()
            raise ReplicaFailedError(f"{self._url} is draining and takes no requests")
        self._replica = replica
        return replica

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> str:
        replica, self._replica = self._replica, None
        if replica is not None:
            try:
                await replica.refresh()  # one that drains, say, answers what is under way
            except RoseError:
                replica.cut()
            await replica.__aexit__()
            self._deadline_s = time.monotonic() + self._return_timeout_s
        return f"its log is where {self._url} runs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessFiles:
    """`log` is appended to by every life of the process; `ready` is written by it, as JSON with its url, once it takes calls."""

    log: Path
    ready: Path


class ReplicaProcess:
    """An Origin that is a child of this process, and the children it has itself.

    Args:
        command: honours SIGTERM and --owner_pid, which is added, and writes `files.ready`.
        start_timeout_s: from its start to its being ready: loading a model and compiling its steps.
    """

    def __init__(
        self,
        replica_id: str,
        command: Sequence[str],
        files: ProcessFiles,
        connect: Connect,
        *,
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float,
    ) -> None:
        self._id, self._files, self._connect = replica_id, files, connect
        self._command = [*command, f"--owner_pid={os.getpid()}"]
        self._environment = {**os.environ, **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._replica: RemoteReplica | None = None
        self._log_start = 0

    @property
    def replica_id(self) -> str:
        return self._id

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> RemoteReplica:
        self._process = None  # of the life before
        self._files.ready.unlink(missing_ok=True)
        self._files.log.parent.mkdir(parents=True, exist_ok=True)
        with self._files.log.open("ab") as log:
            self._log_start = log.tell()
            log.write(f"$ {' '.join(self._command)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is ours to handle: a replica that heard it too would end under our requests
            )
        url = await self._until_ready(self._process)
        replica = self._connect(url)
        try:
            await replica.__aenter__()
        except ReplicaUnavailableError as error:
            raise ReplicaFailedError(str(error)) from None
        self._replica = replica
        return replica

    async def ended(self) -> None:
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> str:
        if self._replica is not None:
            await self._replica.__aexit__()
            self._replica = None
        if self._process is None:
            return "it was not started"
        by_itself = self._process.returncode is not None
        for _ in range(2):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads its group; what is left of that is no use to anybody
        await self._process.wait()
        return self._epitaph(by_itself)

    async def _until_ready(self, process: asyncio.subprocess.Process) -> str:
        deadline_s = time.monotonic() + self._start_timeout_s
        while True:
            is_last = time.monotonic() > deadline_s  # looked at first: time also passes while no event loop runs
            if process.returncode is not None:
                raise ReplicaFailedError("it ended before it was ready")
            if self._files.ready.exists():
                return str(json.loads(self._files.ready.read_text())["url"])
            if is_last:
                raise ReplicaFailedError(f"it was not ready within {self._start_timeout_s:g} s; raise fleet.start_timeout_s")
            await asyncio.sleep(POLL_S)

    def _epitaph(self, by_itself: bool) -> str:
        """How this life ended and its last lines."""
        assert self._process is not None
        status = self._process.returncode
        assert status is not None
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = self._last_lines()
        said = "; it last said:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
        return f"process {self._process.pid} {how if by_itself else 'was told to end'} (log: {self._files.log}){said}"

    def _last_lines(self) -> list[str]:
        if not self._files.log.exists():  # somebody made room
            return []
        with self._files.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - MAX_TAIL_BYTES))
            text = log.read().decode(errors="replace")
        lines = [line.rstrip() for line in text.splitlines()]
        return [line for line in lines if line and not line.startswith("$ ")][-NUM_LAST_LINES:]


def end_with_owner(owner_pid: int) -> None:
    """Have this process get SIGTERM when its parent ends, SIGKILL of the parent included; at once if that has happened already.

    Linux only (prctl(2), PR_SET_PDEATHSIG). What counts is the parent's thread that made this process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != owner_pid:
        os.kill(os.getpid(), signal.SIGTERM)
