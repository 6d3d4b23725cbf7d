"""HTTP: breaks, time limits, tokens, TLS, limits. What holds for every store is in test_stores.py."""

import concurrent.futures
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.transfer.errors import (
    AuthenticationError,
    FarSideError,
    MalformedUpdateError,
    OutcomeUnknownError,
    TransferTimeoutError,
    UnreachableError,
)
from common.transfer.publisher import Publisher
from common.transfer.secrets import Secret, client_tls, read_secret, server_tls
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer, is_loopback
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from tests.common.transfer.models import assert_equal_bits, blank, make_model, small_step
from tests.common.transfer.test_stores import DELTA, head


class BreakingProxy:
    """Passes bytes to a server and cuts each connection after so many of the answer's bytes; None passes everything."""

    def __init__(self, port: int, cuts: list[int | None]) -> None:
        self._port, self._cuts = port, cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            cut = self._cuts.pop(0) if self._cuts else None
            self.num_connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            threading.Thread(target=self._pump, args=(client, server, None), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, cut), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, cut: int | None) -> None:
        try:
            while chunk := source.recv(8192 if cut is None else min(8192, cut)):
                sink.sendall(chunk)
                if cut is not None:
                    cut -= len(chunk)
                    if cut == 0:
                        break
        except OSError:
            pass
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def backing() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def server(backing: MemoryStore, token: Secret) -> Iterator[StoreServer]:
    server = StoreServer(backing, token=token)
    yield server
    server.close()


def test_a_broken_read_goes_on_where_it_stopped(backing: MemoryStore, server: StoreServer, token: Secret) -> None:
    content = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
    backing.open(head(3, 2))
    backing.put(DELTA, "b00000", [content])
    proxy = BreakingProxy(server.port, [10_000, 150_000, 50, 100_000])
    store = HttpStore(proxy.url, token=token)
    room = memoryview(bytearray(len(content)))
    assert bytes(store.read(DELTA, "b00000", start=1000, into=room, timeout_s=10.0)) == content[1000:]
    assert proxy.num_connections == 5
    proxy.close()


def test_a_model_arrives_over_a_link_that_keeps_breaking(backing: MemoryStore, server: StoreServer, token: Secret) -> None:
    model = make_model(width=128)
    publisher = Publisher(backing)
    proxy = BreakingProxy(server.port, [300, 9_000, 70_000, 20, 100_000, 60_000] * 4)
    arrays = blank(model)
    subscriber = Subscriber(HttpStore(proxy.url, token=token), NumpyTarget(arrays), receiver_id="r")
    for version in range(3):
        model = small_step(model, version)
        publisher.publish(version, model).result(10)
        for _ in range(20):
            try:
                staged = subscriber.stage()
                break
            except (UnreachableError, OutcomeUnknownError):
                continue
        assert staged is not None
        subscriber.commit(staged)
        assert_equal_bits(arrays, model)
    proxy.close()


def test_a_learner_behind_a_firewall_pushes(backing: MemoryStore, server: StoreServer, token: Secret) -> None:
    publisher = Publisher(HttpStore(server.url, token=token), anchor_interval=2)
    model = make_model()
    arrays = blank(model)
    subscriber = Subscriber(backing, NumpyTarget(arrays), receiver_id="r")
    for version in range(4):
        model = small_step(model, version)
        publisher.publish(version, model).result(10)
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        assert_equal_bits(arrays, model)
    assert {name: c.version for name, c in backing.confirmations().items()} == {"r": 3}


def silent_server() -> socket.socket:
    """Accepts connections and requests, and never answers."""
    return socket.create_server(("127.0.0.1", 0), backlog=16)


@contextlib.contextmanager
def vanished_host() -> Iterator[str]:
    """An address that takes no connection and refuses none: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_host_that_has_vanished_is_unreachable_within_the_time_limit_of_the_read() -> None:
    with vanished_host() as url, concurrent.futures.ThreadPoolExecutor(1) as pool:
        reading = pool.submit(HttpStore(url, timeout_s=60.0).read, DELTA, "b00000", timeout_s=0.2)
        with pytest.raises(UnreachableError, match="0 bytes came"):
            reading.result(20.0)  # a connection would be waited for much longer


@pytest.mark.parametrize("wanted", ["bytes=5-2", "bytes=99999999999999999999-", "bytes=-3", "bytes=x-", "lines=0-1"])
def test_a_range_that_no_object_has_is_a_bad_request(wanted: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.open(head(3, 2))
    store.put(DELTA, "b00000", [b"0123456789"])
    server = StoreServer(store)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10.0)
    connection.request("GET", f"/{DELTA.path}/b00000", headers={"Range": wanted})
    answer = connection.getresponse()
    assert (answer.status, b"Range" in answer.read()) == (400, True)
    connection.close()
    server.close()


def test_a_server_that_never_answers_is_a_timeout_for_reads_and_unknown_for_writes() -> None:
    with silent_server() as listener:
        store = HttpStore(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.1)
        with pytest.raises(TransferTimeoutError):
            store.read(DELTA, "b00000", timeout_s=0.1)
        with pytest.raises(TransferTimeoutError):
            store.catalog()
        with pytest.raises(OutcomeUnknownError, match="sending it again is safe"):
            store.put(DELTA, "b00000", [b"x"])
        with pytest.raises(OutcomeUnknownError):
            store.confirm("r", 1)


def test_an_unreachable_server_is_told_apart() -> None:
    with silent_server() as listener:
        port = listener.getsockname()[1]
    store = HttpStore(f"http://127.0.0.1:{port}", timeout_s=1.0)
    for act in (lambda: store.put(DELTA, "b00000", [b"x"]), store.catalog, lambda: store.read(DELTA, "b00000", timeout_s=0.2)):
        with pytest.raises((UnreachableError, TransferTimeoutError), match="refused"):
            act()


def test_a_write_on_a_dead_connection_is_repeated(backing: MemoryStore, token: Secret) -> None:
    first = StoreServer(backing, token=token)
    store = HttpStore(first.url, token=token)
    store.open(head(3, 2))
    first.close()
    second = StoreServer(backing, port=first.port, token=token)
    store.put(DELTA, "b00000", [b"abc"])
    assert bytes(backing.read(DELTA, "b00000", timeout_s=0.1)) == b"abc"
    second.close()


def test_the_far_sides_own_words_arrive(backing: MemoryStore, server: StoreServer, token: Secret) -> None:
    backing.open(head(3, 2))
    backing.fail(DELTA, "disk full on host learner-7")
    with pytest.raises(FarSideError, match="disk full on host learner-7"):
        HttpStore(server.url, token=token).read(DELTA, "b00000", timeout_s=1.0)


def test_without_the_token_nothing_is_read_or_written(backing: MemoryStore, server: StoreServer) -> None:
    backing.open(head(3, 2))
    for offered in (None, Secret(b"wrong" * 6, "test")):
        store = HttpStore(server.url, token=offered)
        for act in (
            store.catalog,
            lambda store=store: store.read(DELTA, "b00000", timeout_s=0.1),
            lambda store=store: store.put(DELTA, "b00000", [b"x"]),
            lambda store=store: store.lease(DELTA, "r"),
            lambda store=store: store.remove(DELTA),
        ):
            with pytest.raises(AuthenticationError):
                act()
    entry = backing.catalog().entries[0]
    assert entry.wire_bytes == 0


def test_a_server_without_a_token_can_only_be_read(backing: MemoryStore) -> None:
    server = StoreServer(backing)
    backing.open(head(3, 2))
    store = HttpStore(server.url)
    store.lease(DELTA, "r")
    assert len(store.catalog().entries) == 1
    for act in (lambda: store.put(DELTA, "b00000", [b"x"]), lambda: store.open(head(4)), lambda: store.remove(DELTA)):
        with pytest.raises(AuthenticationError):
            act()
    server.close()


def test_other_addresses_want_a_token(backing: MemoryStore) -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
    with pytest.raises(ValueError, match=r"0\.0\.0\.0 without a token"):
        StoreServer(backing, host="0.0.0.0")


def raw(server: StoreServer, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.putrequest(method, path)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    return response.status, response.read()


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("PUT", "/v3/delta/b00000", {"Content-Length": str(1 << 40)}, b"", 400),
        ("PUT", "/v3/delta/b00000", {"Content-Length": "-1"}, b"", 400),
        ("PUT", "/v3/delta/b00000", {"Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 400),
        ("PUT", "/v3/delta/../../etc", {"Content-Length": "1"}, b"x", 400),
        ("PUT", "/v9/delta/b00000", {"Content-Length": "1"}, b"x", 400),
        ("GET", "/v3/delta/head", {}, b"", 400),
        ("GET", "/v3/delta/%2e%2e", {}, b"", 404),
        ("GET", "/v3/delta/b00000?wait_s=nan", {}, b"", 400),
        ("GET", "/v3/delta/b00000?wait_s=-1", {}, b"", 400),
        ("GET", "/v3/delta/b00000", {"Range": "bytes=-5"}, b"", 400),
        ("GET", "/v99999999999999999/delta/b00000", {}, b"", 404),
        ("POST", "/open", {"Content-Length": "2"}, b"[]", 400),
        ("POST", "/open", {"Content-Length": "3"}, b"{{{", 400),
        ("POST", "/lease", {"Content-Length": "2"}, b"{}", 400),
        ("POST", "/remove", {"Content-Length": str(1 << 20)}, b"", 400),
        ("POST", "/elsewhere", {"Content-Length": "2"}, b"{}", 404),
    ],
)
def test_requests_that_no_client_of_ours_makes_are_refused(
    backing: MemoryStore,
    server: StoreServer,
    token: Secret,
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
) -> None:
    backing.open(head(3, 2))
    headers = headers | {"Authorization": f"Bearer {token.value.decode()}"}
    assert raw(server, method, path, headers, body)[0] == status
    entry = backing.catalog().entries[0]
    assert entry.wire_bytes == 0
    assert HttpStore(server.url, token=token).catalog().entries == (entry,)


class LyingServer:
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(self._answer)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000,
    ],
)
def test_a_server_that_lies_gets_an_error_and_no_memory(answer: bytes) -> None:
    server = LyingServer(answer)
    store = HttpStore(server.url, timeout_s=1.0)
    with pytest.raises((MalformedUpdateError, FarSideError, UnreachableError)):
        store.catalog()
    if b"[1]" not in answer:
        with pytest.raises((MalformedUpdateError, FarSideError, TransferTimeoutError)):
            store.read(DELTA, "b00000", into=memoryview(bytearray(100)), timeout_s=0.5)
    server.close()


def test_urls_carry_no_secrets_and_schemes_fit_their_context() -> None:
    for url in ("ftp://x", "http://user:password@x", "http://x/path", "https://x"):
        with pytest.raises(ValueError, match=r"http|password"):
            HttpStore(url)


def test_secrets_come_from_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    secret = read_secret(f"file:{path}")
    assert secret.value == b"0123456789abcdef"
    assert "0123456789" not in repr(secret)
    monkeypatch.setenv("ROSE_TOKEN", "fedcba9876543210")
    assert read_secret("env:ROSE_TOKEN").matches("fedcba9876543210")
    path.chmod(0o644)
    for source in (f"file:{path}", f"file:{tmp_path}/none", "env:ROSE_NO_SUCH", "0123456789abcdef0123", "file:"):
        with pytest.raises(ValueError, match=r"others may read|no such|named as") as error:
            read_secret(source)
        assert "abcdef0123" not in str(error.value)
    monkeypatch.setenv("ROSE_TOKEN", "short")
    with pytest.raises(ValueError, match="at least 16"):
        read_secret("env:ROSE_TOKEN")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """Self-signed certificates for a server and a client."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    for name in ("server", "client"):
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -addext subjectAltName=IP:127.0.0.1"
        files = ["-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"]
        subprocess.run([*make.split(), "-subj", f"/CN={name}", *files], check=True, capture_output=True)
    return tmp_path


def test_tls_in_both_directions(backing: MemoryStore, token: Secret, certificates: Path) -> None:
    files = {name: (certificates / f"{name}.pem", certificates / f"{name}.key") for name in ("server", "client")}
    server = StoreServer(backing, token=token, tls=server_tls(*files["server"], client_ca=files["client"][0]))
    mutual = client_tls(files["server"][0], certificate=files["client"][0], private_key=files["client"][1])
    store = HttpStore(server.url, token=token, tls=mutual, timeout_s=5.0)
    store.open(head(3, 2))
    content = bytes(1_000_000)
    store.put(DELTA, "b00000", [content])
    assert store.read(DELTA, "b00000", timeout_s=5.0) == content
    for stranger in (client_tls(files["server"][0]), client_tls(files["client"][0])):
        with pytest.raises((UnreachableError, TransferTimeoutError)):
            HttpStore(server.url, token=token, tls=stranger, timeout_s=2.0).catalog()
    server.close()


def test_the_catalogue_waits_for_news(backing: MemoryStore, server: StoreServer, token: Secret) -> None:
    store = HttpStore(server.url, token=token)
    tag = store.catalog().tag
    later = threading.Timer(0.1, lambda: backing.open(head(3, 2)))
    later.start()
    assert store.catalog(after=tag, timeout_s=10.0).tag != tag
    later.join()
    tag = store.catalog().tag
    assert store.catalog(after=tag, timeout_s=0.1).tag == tag
    assert json.dumps([entry.to_json() for entry in store.catalog().entries])
