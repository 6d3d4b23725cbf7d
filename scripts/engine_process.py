"""EngineProcess: the engine's process as the front sees it: started, connected to, and never left behind.

The two share a socket pair and nothing else. The engine process ends when its end of the pair reads nothing more, so it outlives
neither a front that stops nor one that is killed. What it writes to stderr is passed on, and its last lines are kept: they are what
a client and the person at the terminal are told when it dies.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import TracebackType

from common.errors import EngineClosedError
from common.serving.front.channel import Channel
from common.serving.front.engine_client import EngineClient
from scripts.entry import ROOT

NUM_LAST_LINES = 30
"""Of the engine's stderr: enough for the end of a traceback."""
LAST_WORDS_S = 2.0
"""Between the end of the channel and that of the process."""
MAX_LINE_BYTES = 8 << 10
"""A line without an end, of a progress bar say, is passed on in pieces of this size instead of being waited for."""
END_TIMEOUT_S = 20.0
"""How long an engine may take to free its device before it is killed."""


class EngineProcess:
    """Use as `async with`; leaving it ends the process. `arguments` are those of scripts.serve.

    Args:
        two_models: it has a second engine, of rollouts, with a socket pair of its own.
    """

    def __init__(self, arguments: Sequence[str], *, two_models: bool = False) -> None:
        self._arguments = list(arguments)
        self._flags = ("engine_fd", "rollout_fd") if two_models else ("engine_fd",)
        self._ours: list[socket.socket] = []
        self._process: asyncio.subprocess.Process | None = None
        self._clients: list[EngineClient] = []
        self._stderr: asyncio.ReadTransport | None = None
        self._copying: asyncio.Task[None] | None = None
        self._last_lines: collections.deque[str] = collections.deque(maxlen=NUM_LAST_LINES)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def __aenter__(self) -> EngineProcess:
        theirs: dict[str, socket.socket] = {}
        for flag in self._flags:
            ours, theirs[flag] = socket.socketpair()
            self._ours.append(ours)
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        said = asyncio.StreamReader()
        stderr, their_stderr = os.pipe()  # of our own: asyncio waits for a process until its pipes are closed by its children too
        self._stderr, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(said), os.fdopen(stderr, "rb")
        )
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, their_stderr)
            for end in theirs.values():
                stack.enter_context(end)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "scripts.serve",
                *self._arguments,
                f"--owner_pid={os.getpid()}",
                *(f"--{flag}={end.fileno()}" for flag, end in theirs.items()),
                pass_fds=[end.fileno() for end in theirs.values()],
                env=os.environ | {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stderr=their_stderr,
            )
        self._copying = asyncio.create_task(self._copy(said))
        return self

    async def connect(self) -> EngineClient:
        """Wait until the engine is ready, which for a large model takes as long as loading it. Again: the same of the second one.

        Raises:
            EngineClosedError: it failed first; the text is its own.
        """
        channel = await Channel.over(self._ours[len(self._clients)])
        try:
            client = await EngineClient.connect(channel)
        except EngineClosedError as error:
            await channel.close()
            await self._end()
            raise EngineClosedError(f"{error}: {await self.explain()}") from error
        self._clients.append(client)
        return client

    async def explain(self) -> str:
        """How the process ended, in its own words as far as there are any. Waits a moment for it to have ended."""
        assert self._process is not None
        assert self._copying is not None
        ended = asyncio.ensure_future(self._process.wait())
        await asyncio.wait({ended, self._copying}, timeout=LAST_WORDS_S)
        ended.cancel()
        status = self._process.returncode
        if status is None:
            how = "closed its channel"
        elif status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        said = "\n".join(self._last_lines)
        return f"the engine process {self._process.pid} {how}" + (f"; it last said:\n{said}" if said else "")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._clients:
            await client.close()
        if len(self._clients) < len(self._flags) and self._process is not None and self._process.returncode is None:
            self._process.terminate()  # it is still starting and would notice only when it is ready
        for ours in self._ours:
            ours.close()
        await self._end()

    async def _end(self) -> None:
        """Wait for the process, which has lost its channel, to end by itself, or make it."""
        assert self._process is not None
        assert self._copying is not None
        try:
            await asyncio.wait_for(self._process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        await asyncio.wait({self._copying}, timeout=LAST_WORDS_S)  # what it started may live on and hold its stderr
        self._copying.cancel()
        if self._stderr is not None:
            self._stderr.close()

    async def _copy(self, stderr: asyncio.StreamReader) -> None:
        """Pass on and remember what the process says. Never stops before its end: a full pipe would stop the engine."""
        rest = b""
        while piece := await stderr.read(MAX_LINE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) >= MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._last_lines.append(text)
        with contextlib.suppress(OSError):  # nobody reads ours any more; the lines that are kept are still told
            print(text, file=sys.stderr, flush=True)
