"""What clients do wrong is their own affair: it gets an answer of OpenAI's form, and slots, cache and connections come back."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from common.serving.front import server as server_module
from common.serving.front.access import Tokens
from common.serving.front.front import Limits
from common.transfer.secrets import Secret
from tests.common.serving.front.running import MODEL, RunningFront, running_front

NUM_IDLE = 1000


@pytest.fixture(scope="module")
def slow() -> Iterator[RunningFront]:
    """A server whose completions take a while."""
    with running_front(step_s=0.01, limits=Limits(max_body_bytes=100_000, max_completions_per_client=6)) as front:
        yield front


def completion(front: RunningFront, **fields: object) -> tuple[int, dict]:
    return front.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 4, "temperature": 0, **fields})


def start_stream(front: RunningFront, **fields: object) -> http.client.HTTPConnection:
    """A completion whose first event has come."""
    connection = front.http()
    body = {"model": MODEL, "prompt": "go", "max_tokens": 500, "ignore_eos": True, "stream": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    connection.response = response  # keeps it open
    return connection


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"[" * 50_000,
        b'{"model": "fake-model", "prompt": "\xff"}',
        b'{"model": "fake-model", "prompt": "\\ud800"}',
        b'{"model": "\\ud800", "prompt": "go"}',
        b'{"model": "fake-model", "prompt": "go", "temperature": NaN}',
        b'{"model": "fake-model", "prompt": "go", "seed": 1e999}',
        b'{"model": "fake-model", "prompt": "go", "\\ud800": 1}',
        b'{"model": "fake-model", "prompt": [1, true]}',
        b'{"model": "fake-model", "prompt": [9223372036854775808]}',
        b'{"model": "fake-model", "prompt": "go", "stop": ["", "a"]}',
    ],
)
def test_a_malformed_body_is_the_clients_mistake_and_says_so(server: RunningFront, body: bytes) -> None:
    status, _, content = server.ask_raw("/v1/completions", body)
    assert 400 <= status < 500
    assert set(json.loads(content)["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_path_and_a_wrong_method_have_the_same_form(server: RunningFront) -> None:
    assert server.ask("/v1/nothing")[0] == 404
    status, answer = server.ask("/v1/completions")
    assert (status, answer["error"]["code"]) == (405, "method_not_allowed")


def test_a_body_may_not_be_too_large_announced_or_not(slow: RunningFront) -> None:
    body = json.dumps({"model": MODEL, "prompt": "go" * 60_000}).encode()
    assert slow.ask_raw("/v1/completions", body)[0] == 413
    with contextlib.closing(slow.http()) as connection:
        chunks = (body[start : start + 10_000] for start in range(0, len(body), 10_000))
        connection.request("POST", "/v1/completions", chunks, {"Content-Type": "application/json"}, encode_chunked=True)
        with contextlib.suppress(ConnectionError):
            assert connection.getresponse().status == 413
    assert completion(slow)[0] == 200


def test_a_client_that_leaves_in_mid_stream_gives_its_slot_back(slow: RunningFront) -> None:
    connections = [start_stream(slow) for _ in range(4)]
    assert slow.engine.load().running_requests == 4
    for connection in connections:
        connection.close()
    slow.wait_until(slow.is_idle)
    assert completion(slow)[0] == 200


def test_a_client_that_leaves_before_its_answer_gives_its_slot_back(slow: RunningFront) -> None:
    connection = slow.http()
    body = {"model": MODEL, "prompt": "go", "max_tokens": 500, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    slow.wait_until(lambda: slow.engine.load().running_requests == 1)
    connection.close()
    slow.wait_until(slow.is_idle)


def test_a_client_may_not_have_too_much_under_way_and_another_is_not_concerned(slow: RunningFront) -> None:
    connection = start_stream(slow, n=6)
    status, headers, content = slow.ask_raw("/v1/completions", json.dumps({"model": MODEL, "prompt": "go"}).encode())
    assert (status, headers["Retry-After"]) == (429, "1")
    assert json.loads(content)["error"]["code"] == "rate_limit_exceeded"
    connection.close()
    slow.wait_until(slow.is_idle)
    assert completion(slow, n=6)[0] == 200


def test_a_reader_that_stops_holds_neither_a_slot_nor_other_readers(server: RunningFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "READ_TIMEOUT_S", 0.3)
    body = json.dumps(
        {"model": MODEL, "prompt": "go", "max_tokens": 490, "ignore_eos": True, "logprobs": 20, "n": 16, "stream": True}
    )
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", server.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reader.sendall((head + body).encode())
        server.wait_until(lambda: server.engine.load().running_requests > 0)
        assert completion(server)[0] == 200
        server.wait_until(lambda: server.is_idle() and not server.front.concurrency._under_way)
        reader.settimeout(60)
        with contextlib.suppress(ConnectionResetError):  # cut off, with what was on its way
            while reader.recv(1 << 16):
                pass
    assert completion(server)[0] == 200


def test_idle_connections_hold_up_nobody_and_are_closed_in_the_end(server: RunningFront, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = completion(server)
    monkeypatch.setattr(server_module, "REQUEST_TIMEOUT_S", 1.0)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(NUM_IDLE)]
        idle[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")  # half a request is no request either
        for _ in range(5):
            assert completion(server)[1]["choices"] == expected[1]["choices"]
        for connection in idle:
            connection.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    server.wait_until(lambda: len(server.server._server.server_state.connections) == 0)


def test_many_clients_at_once_get_each_its_own_answer(server: RunningFront) -> None:
    def prompt(idx: int) -> dict[str, object]:
        return {"model": MODEL, "prompt": f"go {idx}", "max_tokens": 12, "temperature": 0}

    expected = [server.ask("/v1/completions", prompt(idx))[1]["choices"] for idx in range(24)]
    answers: list[object] = [None] * len(expected)

    def ask(idx: int) -> None:
        answers[idx] = server.ask("/v1/completions", prompt(idx))[1]["choices"]

    threads = [threading.Thread(target=ask, args=(idx,)) for idx in range(len(expected))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == expected


def test_online_clients_need_their_key_when_there_is_one_and_share_no_cache() -> None:
    keys = ["first-key-of-the-tests", "second-key-of-the-tests"]
    prompt = {"model": MODEL, "prompt": "go stay start more again finish upper " * 6, "max_tokens": 2}

    def cached(front: RunningFront, key: str) -> int:
        status, answer = front.ask("/v1/completions", prompt, token=key)
        assert status == 200
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with running_front(tokens=Tokens(online=[Secret(key.encode(), "test") for key in keys])) as front:
        for path in ("/v1/completions", "/v1/models", "/metrics"):
            body = prompt if path == "/v1/completions" else None
            assert front.ask(path, body, token="not-a-key-of-anybody")[0] == 401
        assert cached(front, keys[0]) == 0
        assert cached(front, keys[0]) > 0
        assert cached(front, keys[1]) == 0
