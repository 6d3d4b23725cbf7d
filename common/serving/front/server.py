"""FrontServer: runs the HTTP application on a socket until it is told to stop, or its engine is gone.

The first `stop` lets what is under way finish and refuses what comes with 503; the second ends everything under way with an answer.
Connections cost little and have limits: a request must arrive in time, and a client that reads nothing is cut
off, which gives its slot, cache and memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.serving.front.app import make_app
from common.serving.front.front import Front

REQUEST_TIMEOUT_S = 30.0
"""From the first byte of a request, or from connecting, to the end of its headers."""
READ_TIMEOUT_S = 60.0
"""A client that takes nothing of what it asked for in this time is cut off."""
SEND_BUFFER_BYTES = 1 << 18
"""What the system holds for a client that does not read; left to itself it takes megabytes for each."""
KEEP_ALIVE_S = 75.0
LAST_ANSWERS_S = 5.0
"""After a second `stop`: time for the answers that end what is under way."""
GRACE_S = 2.0
"""Time for connections to take what was sent, once every call has its answer."""
LISTEN_BACKLOG = 2048


class _PatientProtocol(HttpToolsProtocol):
    """Adds to uvicorn's protocol the time limits it lacks: on requests that do not arrive and on answers that are not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else tokens wait up to 40 ms for an acknowledgement
        self._request_timer: asyncio.TimerHandle | None = self.loop.call_later(REQUEST_TIMEOUT_S, transport.abort)
        self._read_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self._request_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop_request_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self._read_timer or self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_request_timer()
        self._stop_read_timer()
        super().connection_lost(exc)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: FrontServer has them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that the port is known, and refused if taken, before an engine is started.

    Raises:
        ValueError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(f"--host={host} --port={port} cannot be listened on: {error.strerror}; name another") from error
    return listener


def allow_many_connections() -> None:
    """As many open files as this process may have: each idle connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class FrontServer:
    """See the module. `run` returns when everything has been answered."""

    def __init__(self, front: Front, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        self._front, self._listener = front, listener
        config = uvicorn.Config(
            make_app(front),
            http=_PatientProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(GRACE_S),
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._server = _Server(config)
        self._stopping: asyncio.Task[None] | None = None

    async def run(self, engine_run: asyncio.Task[str]) -> str | None:
        """Serve until stopped (None), or until the engine is gone (its own words).

        Args:
            engine_run: EngineClient.run under way.
        """
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await asyncio.wait({serving, engine_run}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            return None
        with contextlib.suppress(TimeoutError):  # every call has been given the error; clients may be slow to take it
            await asyncio.wait_for(self._front.calls.drain(), LAST_ANSWERS_S)
        self._server.should_exit = True
        await serving
        return engine_run.result()

    def stop(self) -> None:
        """The first time: drain, then end. The second time: end what is under way, then end."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._drain())
        else:
            self._front.calls.stop_now.set()

    async def _drain(self) -> None:
        drained = asyncio.create_task(self._front.calls.drain())
        told_again = asyncio.create_task(self._front.calls.stop_now.wait())
        await asyncio.wait({drained, told_again}, return_when=asyncio.FIRST_COMPLETED)
        told_again.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drained, LAST_ANSWERS_S)
        self._server.should_exit = True


def address_of(listener: socket.socket, *, tls: bool) -> str:
    """The URL that a listener is reached at."""
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
