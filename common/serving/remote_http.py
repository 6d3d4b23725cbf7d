"""HttpClient: calls with a body each way to one server, over connections that are kept and used again, each with a time limit.

Small on purpose: HTTP/1.1 as our own front speaks it, no redirects, no cookies. It repeats nothing: whether a call that broke may
be sent again is its caller's to know, so a call fails as NotSentError, AnswerLostError or TimeoutError. Invariant: a connection
carries one call at a time, and one whose call did not end well is never used again, so that a late answer reaches nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import urllib.parse
from collections.abc import Mapping

import httptools

from common.errors import RoseError

MAX_ANSWER_BYTES = 1 << 28
"""Far above any answer of ours; more means that something else answers there."""
CONNECT_TIMEOUT_S = 10.0


class NotSentError(RoseError):
    """The server could not be reached; it knows nothing of this call."""


class AnswerLostError(RoseError):
    """The connection broke after the call was sent: the server may or may not have carried it out."""


@dataclasses.dataclass(frozen=True)
class HttpAnswer:
    """A whole answer."""

    status: int
    body: bytes


class HttpClient:
    """See the module. To be used from one event loop; `close` when done.

    Raises:
        ValueError: `url` is not http(s)://HOST[:PORT].
    """

    def __init__(self, url: str, *, tls: ssl.SSLContext | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{url!r} is no address of a replica; write http://HOST:PORT or https://HOST:PORT")
        self._host, self._authority = parts.hostname, parts.netloc
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    async def ask(
        self, method: str, path: str, body: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float
    ) -> HttpAnswer:
        """One call. Cancelling it cuts its connection, by which the server knows that nobody waits any more.

        Raises:
            NotSentError, AnswerLostError: see there.
            TimeoutError: no whole answer within `timeout_s`.
        """
        lines = [f"{method} {path} HTTP/1.1", f"host: {self._authority}", f"content-length: {len(body)}"]
        lines += ["content-type: application/json"] if body else []
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        async with asyncio.timeout(timeout_s):
            connection = await self._connection()
            self._busy.add(connection)
            try:
                answer = await connection.ask("\r\n".join([*lines, "", ""]).encode() + body)
            except BaseException:
                connection.abort()
                raise
            finally:
                self._busy.discard(connection)
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    def drop_idle(self) -> None:
        """Cut the connections that are kept."""
        while self._idle:
            self._idle.pop().abort()

    def close(self) -> None:
        """Take no more calls: they fail with NotSentError. Those under way may still be answered, see `cut`."""
        self._closed = True
        self.drop_idle()

    def cut(self) -> None:
        """Have calls under way fail with AnswerLostError."""
        for connection in self._busy:
            connection.abort()

    async def _connection(self) -> _Connection:
        self._check_open()
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise NotSentError(f"no connection to {self._authority} within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise NotSentError(f"no connection to {self._authority}: {error.strerror or error}") from error
        if self._closed:
            connection.abort()
        self._check_open()
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise NotSentError(f"the connections to {self._authority} were closed from here")


class _Connection(asyncio.Protocol):
    """One connection; httptools calls the on_ methods."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[HttpAnswer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self.reusable = True

    async def ask(self, message: bytes) -> HttpAnswer:
        assert self._transport is not None
        assert self._waiting is None, "a call is under way on this connection"
        self._pieces, self._num_bytes = [], 0
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            return await self._waiting
        finally:
            self._waiting = None

    def abort(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._fail(f"the connection was closed before the answer came{f' ({error})' if error else ''}")

    def data_received(self, data: bytes) -> None:
        if self._waiting is None:  # nothing was asked
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came back is not HTTP: {error}")
            self.abort()

    def on_body(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._fail(f"the answer has more than {MAX_ANSWER_BYTES} bytes")
            self.abort()
            return
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(HttpAnswer(self._parser.get_status_code(), b"".join(self._pieces)))

    def _fail(self, text: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(AnswerLostError(text))
