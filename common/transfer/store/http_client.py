"""HttpStore: a store behind a StoreServer. One persistent connection a thread, bodies read into the caller's memory.

Reads go on after a broken connection from where they stopped. Writes are repeated once on a connection that turns out to be dead;
if the answer still does not come, the outcome is unknown and says so. Every wait has an end, and what the far side says is kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import logging
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator

import numpy as np

from common.transfer.errors import (
    MalformedUpdateError,
    OutcomeUnknownError,
    TransferError,
    TransferTimeoutError,
    UnreachableError,
)
from common.transfer.manifest import MANIFEST_NAME, MAX_VERSION, UpdateHead, UpdateKey
from common.transfer.secrets import Secret
from common.transfer.store.http_wire import (
    MAX_ERROR_BYTES,
    MAX_JSON_BYTES,
    MAX_OBJECT_BYTES,
    MAX_WAIT_S,
    UNREACHABLE_STATUS,
    error_of,
)
from common.transfer.store.protocol import (
    LEASE_TTL_S,
    Arrived,
    Catalog,
    Confirmation,
    Parts,
    check_object_name,
    parse_entry,
)

log = logging.getLogger(__name__)

WAIT_S = 10.0
"""How long one request waits for news before it asks again."""
RECONNECT_PAUSE_S = 0.1
PIECE_BYTES = 256 << 10
"""Taken from the connection at a time where somebody wants to know what has come; else the whole body is."""
_BROKEN = (ConnectionError, http.client.HTTPException, TimeoutError, socket.gaierror, ssl.SSLError, OSError)


@dataclasses.dataclass
class _Answer:
    status: int
    length: int
    response: http.client.HTTPResponse


class HttpStore:
    """A Store (see the protocol). `timeout_s` bounds every wait for the far side's next byte."""

    def __init__(
        self, url: str, *, token: Secret | None = None, tls: ssl.SSLContext | None = None, timeout_s: float = 60.0
    ) -> None:
        parsed = urllib.parse.urlsplit(url)
        if parsed.scheme not in ("http", "https") or parsed.hostname is None or parsed.path not in ("", "/"):
            raise ValueError(f"{url} is not of the form http://host:port or https://host:port")
        if parsed.username or parsed.password:
            raise ValueError("a URL must not carry a password; give a token from a file or the environment")
        if (parsed.scheme == "https") != (tls is not None):
            raise ValueError(f"{url}: https needs a TLS context (see common.transfer.secrets), http takes none")
        self._host, self._port, self._tls, self._timeout_s = parsed.hostname, parsed.port, tls, timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token.value.decode()}"}
        self._local = threading.local()

    def catalog(self, *, after: str | None = None, timeout_s: float = 0.0) -> Catalog:
        deadline_s = time.monotonic() + timeout_s
        while True:
            wait_s = min(max(0.0, deadline_s - time.monotonic()), WAIT_S, MAX_WAIT_S)
            query = {"wait_s": f"{wait_s:.3f}"} | ({} if after is None else {"after": after})
            fields = self._json("GET", "/catalog?" + urllib.parse.urlencode(query), wait_s=wait_s)
            try:
                catalog = Catalog(tag=str(fields["tag"]), entries=tuple(parse_entry(entry) for entry in fields["entries"]))
            except (KeyError, TypeError) as e:
                raise MalformedUpdateError(f"the catalogue is not one: {e}") from None
            if catalog.tag != after or time.monotonic() >= deadline_s:
                return catalog

    def open(self, head: UpdateHead) -> None:
        self._json("POST", "/open", head.to_json())

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        path = f"/{key.path}/{check_object_name(name)}"
        with self._answer("PUT", path, parts, 0.0) as answer:
            self._small_body(answer, path)

    def seal(self, key: UpdateKey, manifest: bytes) -> None:
        self.put(key, MANIFEST_NAME, [manifest])

    def fail(self, key: UpdateKey, text: str) -> None:
        self._json("POST", "/fail", {**_fields(key), "text": text})

    def read(
        self,
        key: UpdateKey,
        name: str,
        *,
        timeout_s: float,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        arrived: Arrived | None = None,
    ) -> memoryview:
        path = f"/{key.path}/{check_object_name(name)}"
        body = _Body(path, start, length, into, arrived)
        deadline_s = time.monotonic() + timeout_s
        while True:
            wait_s = min(max(0.0, deadline_s - time.monotonic()), WAIT_S)
            done = body.done
            try:
                why = self._read_once(body, wait_s, timeout_s)
                if body.complete:
                    return body.content
            except _BROKEN as e:
                self._drop()
                why = _say(e)
                log.info("%s: going on after %d bytes: %s", path, body.done, why)
                time.sleep(min(RECONNECT_PAUSE_S, max(0.0, deadline_s - time.monotonic())))
            except BaseException:
                self._drop()  # the rest of a body would be taken for the next answer
                raise
            if body.done > done:
                deadline_s = time.monotonic() + timeout_s
            elif time.monotonic() >= deadline_s:
                what = f"{path} at {self._host}:{self._port}: {body.done} bytes came, then nothing for {timeout_s} s"
                raise TransferTimeoutError(f"{what}: it does not exist yet") if why is None else UnreachableError(f"{what}: {why}")

    def _read_once(self, body: _Body, wait_s: float, timeout_s: float) -> str | None:
        """Ask for what is missing and take what comes. Nothing comes if the object does not exist within `wait_s`; if the far side
        says why it cannot come now, that is returned."""
        connection = self._connection(wait_s + min(timeout_s, self._timeout_s))
        connection.request("GET", f"{body.path}?wait_s={wait_s:.3f}", headers=self._headers | body.range_header())
        response = connection.getresponse()
        if response.status == 204:
            response.read()
        elif response.status in (200, 206):
            body.announce(_length(response, body.path))
            body.take(response)
        else:
            text = response.read(MAX_ERROR_BYTES).decode(errors="replace")
            self._drop()
            if response.status == UNREACHABLE_STATUS:
                time.sleep(min(RECONNECT_PAUSE_S, wait_s))
                return text
            raise error_of(response.status, text, f"GET {body.path}")
        return None

    def lease(self, key: UpdateKey, holder: str, ttl_s: float = LEASE_TTL_S) -> None:
        self._json("POST", "/lease", {**_fields(key), "holder": holder, "ttl_s": ttl_s})

    def release(self, key: UpdateKey, holder: str) -> None:
        self._json("POST", "/release", {**_fields(key), "holder": holder})

    def confirm(self, receiver: str, version: int) -> None:
        self._json("POST", "/confirm", {"receiver": receiver, "version": version})

    def confirmations(self) -> dict[str, Confirmation]:
        try:
            return {
                str(name): Confirmation(int(version), float(age_s))
                for name, (version, age_s) in self._json("GET", "/confirmations").items()
            }
        except (TypeError, ValueError) as e:
            raise MalformedUpdateError(f"the confirmations are none: {e}") from None

    def remove(self, key: UpdateKey, *, force: bool = False) -> bool:
        return self._json("POST", "/remove", {**_fields(key), "force": force}).get("removed") is True

    def post(self, path: str, fields: dict[str, object]) -> dict:
        """The answer to a request beyond the Store protocol. It may be sent twice."""
        return self._json("POST", path, fields)

    def _json(self, method: str, path: str, fields: dict[str, object] | None = None, *, wait_s: float = 0.0) -> dict:
        parts = [] if fields is None else [json.dumps(fields).encode()]
        with self._answer(method, path, parts, wait_s) as answer:
            body = self._small_body(answer, path)
        try:
            value = json.loads(body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise MalformedUpdateError(f"{method} {path}: the answer is not a JSON object")
        return value

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, parts: Parts, wait_s: float) -> Iterator[_Answer]:
        """Send a request that may be repeated, once more if the connection was dead. Raises what a bad status stands for."""
        response = None
        for last in (False, True):
            sent = False
            try:
                connection = self._connection(wait_s + self._timeout_s)
                sent = True
                headers = self._headers | {"Content-Length": str(sum(map(len, parts)))}
                connection.request(method, path, body=iter(parts), headers=headers)
                response = connection.getresponse()
                break
            except _BROKEN as e:
                self._drop()
                if last:
                    raise self._failure(f"{method} {path}", e, sent=sent and method != "GET") from None
        assert response is not None
        if response.status not in (200, 206):
            text = response.read(MAX_ERROR_BYTES).decode(errors="replace")
            self._drop()
            raise error_of(response.status, text, f"{method} {path}")
        try:
            yield _Answer(response.status, _length(response, path), response)
        except _BROKEN as e:
            self._drop()
            raise self._failure(f"{method} {path}", e, sent=method != "GET") from None

    def _failure(self, what: str, error: BaseException, *, sent: bool) -> TransferError:
        where = f"{what} at {self._host}:{self._port}: {_say(error)}"
        if sent:
            return OutcomeUnknownError(f"{where}; sending it again is safe")
        if isinstance(error, TimeoutError):
            return TransferTimeoutError(f"{where}: nothing within {self._timeout_s} s")
        return UnreachableError(where)

    def _small_body(self, answer: _Answer, path: str) -> bytes:
        if answer.length > MAX_JSON_BYTES:
            raise MalformedUpdateError(f"{path}: an answer of {answer.length} bytes, at most {MAX_JSON_BYTES} are possible")
        body = answer.response.read()
        if len(body) != answer.length:
            raise http.client.IncompleteRead(body, answer.length - len(body))
        return body

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """This thread's, which waits `timeout_s` for each thing: for being made too, should the far host be gone without a word."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None or connection.sock is None:
            if self._tls is None:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
            else:
                connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
            connection.connect()
            assert connection.sock is not None
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.connection = connection
        assert connection.sock is not None
        connection.sock.settimeout(timeout_s)
        return connection

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._local.connection = None


class _Body:
    """An object on its way into memory, possibly over several connections."""

    def __init__(self, path: str, start: int, length: int | None, into: memoryview | None, arrived: Arrived | None) -> None:
        self.path, self.done = path, 0
        self._arrived = arrived
        self._start, self._length, self._into = start, length, into
        self._total: int | None = None

    @property
    def complete(self) -> bool:
        return self._total is not None and self.done == self._total

    @property
    def content(self) -> memoryview:
        assert self._into is not None
        return self._into[: self.done]

    def range_header(self) -> dict[str, str]:
        if self._start == 0 and self._length is None and self.done == 0:
            return {}
        last = "" if self._length is None else str(self._start + self._length - 1)
        return {"Range": f"bytes={self._start + self.done}-{last}"}

    def announce(self, num_bytes: int) -> None:
        """So many bytes will follow: make room, unless that is more than possible."""
        if self.done == 0:
            limit = MAX_OBJECT_BYTES if self._length is None else self._length
            limit = limit if self._into is None else min(limit, len(self._into))
            if num_bytes > limit:
                raise MalformedUpdateError(f"{self.path} has {num_bytes} bytes where at most {limit} are possible")
            self._total = num_bytes
            if self._into is None or len(self._into) < num_bytes:
                self._into = np.empty(num_bytes, np.uint8).data
        elif self.done + num_bytes != self._total:
            raise MalformedUpdateError(f"{self.path} had {self._total} bytes, after a break it has {self.done + num_bytes}")

    def take(self, response: http.client.HTTPResponse) -> None:
        assert self._into is not None
        assert self._total is not None
        while self.done < self._total:
            if self._arrived is None:
                got = response.readinto(self._into[self.done : self._total])
            else:
                piece = response.read1(min(PIECE_BYTES, self._total - self.done))
                got = len(piece)
                self._into[self.done : self.done + got] = piece
            if not got:
                raise ConnectionError(f"closed after {self.done} of {self._total} bytes")
            self.done += got
            if self._arrived is not None:
                self._arrived(self.content, self._total)
        response.read()  # the empty rest: the connection is free for the next request


def _length(response: http.client.HTTPResponse, path: str) -> int:
    length = response.getheader("Content-Length")
    if length is None:
        raise http.client.HTTPException("the answer's headers break off")
    if not length.isdecimal() or int(length) >= MAX_VERSION:
        raise MalformedUpdateError(f"{path}: the answer does not say how long it is")
    return int(length)


def _fields(key: UpdateKey) -> dict[str, object]:
    return {"version": key.version, "kind": str(key.kind)}


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
