"""StoreServer: any store over HTTP. One thread a connection, connections live long, objects leave straight from the store's memory.

Receivers pull; a learner behind a firewall may push (PUT). Whatever changes the store needs the token; reading, leasing and
confirming need it too if the server has one. Refuses to listen beyond this machine without a token. Never logs headers.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from common.transfer.errors import (
    AuthenticationError,
    MalformedUpdateError,
    TransferError,
    TransferTimeoutError,
    UnreachableError,
)
from common.transfer.manifest import MANIFEST_NAME, MAX_VERSION, UpdateKey, UpdateKind, parse_head
from common.transfer.secrets import Secret
from common.transfer.store.http_wire import MAX_OBJECT_BYTES, MAX_POST_BYTES, MAX_WAIT_S, parse_object_path, status_of
from common.transfer.store.protocol import LEASE_TTL_S, Store, check_object_name

log = logging.getLogger(__name__)

IDLE_TIMEOUT_S = 120.0
"""A connection that says nothing, or takes nothing, for this long is closed."""

OnPeer = Callable[[dict[str, object]], dict[str, object]]

CLOSE_POLL_S = 0.05
"""How often the listening thread looks whether it should stop."""


class StoreServer:
    """Serves `store` from construction until close. `port` is the one bound when 0 was asked for."""

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: Secret | None = None,
        tls: ssl.SSLContext | None = None,
        read_only: bool = False,
        on_peer: OnPeer | None = None,
    ) -> None:
        """
        Args:
            read_only: refuse whatever changes the store, with any token.
            on_peer: answers what replicas that feed each other report (POST /peer).
        """
        if not is_loopback(host) and token is None:
            raise ValueError(f"refusing to serve weights on {host} without a token; give one, or listen on 127.0.0.1")
        if not is_loopback(host) and tls is None:
            log.warning("serving on %s without TLS: the token and the weights can be read on the way", host)
        self._server = _Server((host, port), store, token, tls, read_only, on_peer)
        self.host, self.port = host, self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(CLOSE_POLL_S,), name="store-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self._server.tls is None else 'https'}://{host}:{self.port}"

    def close(self) -> None:
        """Stop listening and cut all connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._server.cut_connections()
        self._thread.join()


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        store: Store,
        token: Secret | None,
        tls: ssl.SSLContext | None,
        read_only: bool,
        on_peer: OnPeer | None,
    ) -> None:
        self.store, self.token, self.tls = store, token, tls
        self.read_only, self.on_peer = read_only, on_peer
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def finish_request(self, request: object, client_address: object) -> None:
        """In the connection's own thread, so that a slow handshake holds up nobody else."""
        assert isinstance(request, socket.socket)
        request.settimeout(IDLE_TIMEOUT_S)
        request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = request if self.tls is None else self.tls.wrap_socket(request, server_side=True)
        with self._lock:
            self._open.add(connection)
        try:
            super().finish_request(connection, client_address)
        finally:
            with self._lock:
                self._open.discard(connection)
            if connection is not request:
                connection.close()

    def cut_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    log.debug("a connection was gone already")

    def handle_error(self, request: object, client_address: object) -> None:
        log.info("connection of %s ended", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rose", ""

    def do_GET(self) -> None:
        self._answer(self._get, changes_store=False)

    def do_PUT(self) -> None:
        self._answer(self._put, changes_store=True)

    def do_POST(self) -> None:
        self._answer(self._post, changes_store=self.path in ("/open", "/fail", "/remove"))

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.address_string(), format % args)

    def _answer(self, act: object, *, changes_store: bool) -> None:
        assert callable(act)
        self._body_left = self._announced_body()
        try:
            self._authenticate(changes_store)
            act()
        except _ReaderGoneError as e:
            self.close_connection = True
            raise ConnectionError("the reader went away") from e
        except TransferError as e:
            self._send_text(status_of(e), str(e))
        except (KeyError, ValueError, TypeError) as e:
            self._send_text(400, f"{type(e).__name__}: {e}")
        except (ConnectionError, TimeoutError, ssl.SSLError):
            self.close_connection = True
            raise
        except Exception as e:
            log.exception("%s %s failed", self.command, self.path)
            self._send_text(500, f"{type(e).__name__}: {e}")
        if self._body_left:
            self.close_connection = True  # what was not read would be taken for the next request

    def _announced_body(self) -> int:
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not length.isdecimal() or len(length) > 15:
            self.close_connection = True
            return 0
        return int(length)

    def _authenticate(self, changes_store: bool) -> None:
        token = self.server.token
        if token is None:
            if changes_store:
                raise AuthenticationError("this server has no token, so nothing can be written through it")
            return
        if changes_store and self.server.read_only:
            raise AuthenticationError("this server only reads; write to the store that the learner publishes to")
        scheme, _, offered = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not token.matches(offered):
            raise AuthenticationError("missing or wrong token")

    def _query(self) -> tuple[str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        return url.path, dict(urllib.parse.parse_qsl(url.query, max_num_fields=8))

    @staticmethod
    def _wait_s(query: dict[str, str]) -> float:
        wait_s = float(query.get("wait_s", "0"))
        if not 0 <= wait_s < math.inf:
            raise ValueError(f"wait_s={wait_s} must be a number of seconds")
        return min(wait_s, MAX_WAIT_S)

    def _get(self) -> None:
        path, query = self._query()
        store = self.server.store
        if path == "/catalog":
            catalog = store.catalog(after=query.get("after"), timeout_s=self._wait_s(query))
            self._send_json({"tag": catalog.tag, "entries": [entry.to_json() for entry in catalog.entries]})
        elif path == "/confirmations":
            self._send_json({name: [c.version, c.age_s] for name, c in store.confirmations().items()})
        elif (where := parse_object_path(path)) is not None:
            self._send_object(*where, self._wait_s(query))
        else:
            self._send_text(404, "no such path")

    def _send_object(self, key: UpdateKey, name: str, wait_s: float) -> None:
        start, length = self._range()
        body = _Body(self, start, whole=start == 0 and length is None)
        read = self.server.store.read
        try:
            content = read(key, check_object_name(name), start=start, length=length, timeout_s=wait_s, arrived=body.arrived)
            body.arrived(content, len(content))
        except TransferError as e:
            if body.begun:
                raise ConnectionError(f"{key.path}/{name} broke off: {e}") from e  # nothing but a cut can say so now
            if not isinstance(e, TransferTimeoutError) or isinstance(e, UnreachableError):
                raise
            self.send_response(204)
            self.end_headers()

    def _range(self) -> tuple[int, int | None]:
        """One range from the front, as our client asks for them: bytes=START- or bytes=START-END."""
        wanted = self.headers.get("Range")
        if wanted is None:
            return 0, None
        unit, _, span = wanted.partition("=")
        first, _, last = span.partition("-")
        if unit != "bytes" or not first.isdecimal() or not (last == "" or last.isdecimal()) or len(span) > 40:
            raise MalformedUpdateError(f"Range {wanted!r:.80} is not bytes=START- or bytes=START-END")
        start, end = int(first), int(last) + 1 if last else None
        if start >= MAX_VERSION or (end is not None and end < start):
            raise MalformedUpdateError(f"Range {wanted!r:.80} begins beyond every object, or ends before it begins")
        return start, None if end is None else end - start

    def _read_body(self, limit: int) -> memoryview:
        if self._body_left > limit or self.close_connection:
            raise MalformedUpdateError(f"a body needs its Content-Length, of at most {limit} bytes")
        body = np.empty(self._body_left, np.uint8).data
        done = 0
        while done < len(body):
            got = self.rfile.readinto(body[done:])
            if not got:
                raise ConnectionError(f"the connection broke after {done} of {len(body)} bytes")
            done += got
        self._body_left = 0
        return body

    def _put(self) -> None:
        where = parse_object_path(self._query()[0])
        if where is None:
            raise MalformedUpdateError("PUT needs a path such as /v7/delta/b00000")
        key, name = where
        check_object_name(name)
        if self.server.store.catalog().find(key) is None:
            raise MalformedUpdateError(f"{key.path} is not open")
        body = self._read_body(MAX_OBJECT_BYTES)
        if name == MANIFEST_NAME:
            self.server.store.seal(key, bytes(body))
        else:
            self.server.store.put(key, name, [body])
        self._send_json({})

    def _post(self) -> None:
        fields = json.loads(bytes(self._read_body(MAX_POST_BYTES)))
        if not isinstance(fields, dict):
            raise MalformedUpdateError("the body must be a JSON object")
        store = self.server.store
        answer: dict[str, object] = {}
        match self.path:
            case "/open":
                store.open(parse_head(fields))
            case "/fail":
                store.fail(_key(fields), str(fields["text"]))
            case "/remove":
                answer["removed"] = store.remove(_key(fields), force=fields["force"] is True)
            case "/lease":
                store.lease(_key(fields), str(fields["holder"]), min(float(fields["ttl_s"]), 10 * LEASE_TTL_S))
            case "/release":
                store.release(_key(fields), str(fields["holder"]))
            case "/peer" if self.server.on_peer is not None:
                answer = self.server.on_peer(fields)
            case "/confirm":
                store.confirm(str(fields["receiver"]), _count(fields["version"]))
            case _:
                self._send_text(404, "no such path")
                return
        self._send_json(answer)

    def _send_json(self, value: object) -> None:
        self._send(200, "application/json", json.dumps(value).encode())

    def _send_text(self, status: int, text: str) -> None:
        self._send(status, "text/plain; charset=utf-8", text[:2000].encode(errors="replace"))

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if self._body_left:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)


class _ReaderGoneError(Exception):
    """Not the store's doing, so a store must not take it for a break of its own."""


class _Body:
    """Sends an object while it arrives in the store."""

    def __init__(self, handler: _Handler, start: int, *, whole: bool) -> None:
        self._handler, self._start, self._whole = handler, start, whole
        self.begun, self._sent = False, 0

    def arrived(self, content: memoryview, num_bytes: int) -> None:
        try:
            if not self.begun:
                self.begun = True
                self._send_head(num_bytes)
            if len(content) > self._sent:
                self._handler.wfile.write(content[self._sent :])
                self._sent = len(content)
        except OSError as e:
            raise _ReaderGoneError(str(e)) from e

    def _send_head(self, num_bytes: int) -> None:
        handler = self._handler
        handler.send_response(200 if self._whole else 206)
        handler.send_header("Content-Length", str(num_bytes))
        handler.send_header("Content-Type", "application/octet-stream")
        if not self._whole:
            handler.send_header("Content-Range", f"bytes {self._start}-{self._start + num_bytes - 1}/*")
        handler.end_headers()


def _key(fields: dict[str, object]) -> UpdateKey:
    return UpdateKey(_count(fields["version"]), UpdateKind(str(fields["kind"])))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < MAX_VERSION:
        raise MalformedUpdateError(f"{value!r:.80} is not a version")
    return value
