"""RemoteReplica where the network misbehaves: what is sent twice runs once, what comes late reaches nobody, every wait ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest

from common.errors import EngineClosedError, ReplicaUnavailableError, RequestRejectedError
from common.serving.fake_model import make_weights
from common.serving.front.remote_errors import FarProcessError
from common.serving.remote import RemoteAddress, RemoteReplica, TimeLimits
from common.serving.remote_http import AnswerLostError, HttpClient, NotSentError
from common.transfer.errors import AuthenticationError, OutcomeUnknownError, UnreachableError
from common.transfer.publisher import Publisher
from common.transfer.secrets import Secret
from common.transfer.store.directory import DirectoryStore
from common.types import Request, SamplingKey, SamplingParams
from tests.common.serving.fake_replica import VOCAB_SIZE, FakeServer, fake_server

PATIENCE_S = 60.0
NOBODY = RemoteAddress(url="http://127.0.0.1:9", rollout_token=Secret(b"a" * 16, ""), control_token=Secret(b"b" * 16, ""))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = tmp_path_factory.mktemp("store")
    publisher = Publisher(DirectoryStore(folder))
    publisher.publish(1, make_weights(1, VOCAB_SIZE)).result()
    publisher.close()
    with fake_server(folder) as server:

        async def sync() -> None:
            async with RemoteReplica("r", server.address) as replica:
                await replica.stage()
                await replica.commit()

        asyncio.run(sync())
        yield server


class Proxy:
    """Passes calls on to a server. It cuts so many connections instead of passing the answer on, or holds answers back."""

    def __init__(self, upstream: str) -> None:
        _, _, self._upstream_port = upstream.rpartition(":")
        self.num_cuts = 0
        self.num_connections = 0
        self.held: asyncio.Event | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", int(self._upstream_port))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                up_writer.write(await _message(reader))
                answer = await _message(up_reader)
                if self.held is not None:
                    await self.held.wait()
                if self.num_cuts:
                    self.num_cuts -= 1
                    break
                writer.write(answer)
        for each in (writer, up_writer):
            each.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), b"0")
    return head + await reader.readexactly(int(length))


def request(number: int, *, max_tokens: int = 6, **fields: Any) -> Request:
    return Request(
        request_id=f"q{number}",
        prompt_token_ids=(1, 2, 3),
        sampling=fields.pop("sampling", SamplingParams(max_tokens=max_tokens)),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
        **fields,
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=PATIENCE_S))


def test_a_call_whose_answer_is_lost_is_sent_again_and_runs_once(server: FakeServer) -> None:
    async def work() -> None:
        proxy = Proxy(server.url)
        async with proxy.running() as url, RemoteReplica("r", dataclasses.replace(server.address, url=url)) as replica:
            undisturbed = await replica.generate(request(1))
            num_before = len(server.engine.requests)
            proxy.num_cuts = 2
            assert (await replica.generate(request(1))).token_ids == undisturbed.token_ids
            assert len(server.engine.requests) == num_before + 1
            assert proxy.num_cuts == 0

    run(work())


def test_connections_are_used_again(server: FakeServer) -> None:
    async def work() -> None:
        proxy = Proxy(server.url)
        async with proxy.running() as url, RemoteReplica("r", dataclasses.replace(server.address, url=url)) as replica:
            for number in range(5):
                await replica.generate(request(number))
            assert proxy.num_connections == 1
            await asyncio.gather(*(replica.generate(request(number)) for number in range(4)))
            assert proxy.num_connections == 4

    run(work())


def test_an_answer_that_comes_too_late_reaches_nobody_and_the_next_call_gets_its_own(server: FakeServer) -> None:
    async def work() -> None:
        proxy = Proxy(server.url)
        limits = TimeLimits(generate_s=0.2)
        async with (
            proxy.running() as url,
            RemoteReplica("r", dataclasses.replace(server.address, url=url), limits=limits) as replica,
        ):
            proxy.held = asyncio.Event()
            with pytest.raises(EngineClosedError, match=r"replica r at http.* left a call unanswered: nothing within 0.2 s"):
                await replica.generate(request(1))
            proxy.held.set()
            proxy.held = None
            replica._limits = TimeLimits()
            assert (await replica.generate(request(2))).request_id == "q2"

    run(work())


def test_a_server_that_cuts_every_connection_ends_the_call(server: FakeServer) -> None:
    async def work() -> None:
        proxy = Proxy(server.url)
        async with proxy.running() as url, RemoteReplica("r", dataclasses.replace(server.address, url=url)) as replica:
            proxy.num_cuts = 1000
            with pytest.raises(EngineClosedError, match="closed before the answer came"):
                await replica.generate(request(1))
            with pytest.raises(OutcomeUnknownError, match="sending it again is safe"):
                await replica.commit()

    run(work())


def test_nobody_there_is_told_apart_from_a_lost_answer() -> None:
    async def work() -> None:
        replica = RemoteReplica("gone", NOBODY)
        with pytest.raises(ReplicaUnavailableError, match=r"replica gone at .* cannot be reached"):
            await replica.generate(request(1))
        with pytest.raises(UnreachableError, match="stage"):
            await replica.stage()
        with pytest.raises(ReplicaUnavailableError):
            await replica.__aenter__()

    run(work())


def test_a_wrong_token_and_a_foreign_server_are_named(server: FakeServer) -> None:
    async def foreign(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
        writer.close()

    async def work() -> None:
        wrong = dataclasses.replace(server.address, rollout_token=Secret(b"wrong-token-of-16", ""))
        async with RemoteReplica("r", wrong) as replica:
            with pytest.raises(AuthenticationError, match="API key"):
                await replica.generate(request(1))
        listener = await asyncio.start_server(foreign, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with pytest.raises(FarProcessError, match="hello"):
            await RemoteReplica("r", dataclasses.replace(server.address, url=url)).refresh()
        listener.close()

    run(work())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": SamplingParams(max_tokens=2, stop_strings=("end",))}, "stop strings"),
        ({"priority": 3}, "priority=3"),
    ],
)
def test_what_the_interface_does_not_carry_is_refused(server: FakeServer, fields: dict[str, Any], words: str) -> None:
    async def work() -> None:
        async with RemoteReplica("r", server.address) as replica:
            with pytest.raises(RequestRejectedError, match=words):
                await replica.generate(request(1, **fields))

    run(work())


def test_counters_are_those_of_this_replicas_own_calls(server: FakeServer) -> None:
    async def work() -> None:
        async with RemoteReplica("other", server.address) as other, RemoteReplica("r", server.address) as replica:
            await other.generate(request(7))
            completion = await replica.generate(request(8, max_tokens=9))
            assert replica.counters.sampled_tokens == len(completion.token_ids) == 9
            assert replica.counters.prefill_tokens == 3 - completion.cached_prompt_tokens
            assert (await replica.refresh()).replica_id == "r"
            assert replica.counters.num_steps >= 9
            assert replica.info.max_slots == 4

    run(work())


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "127.0.0.1:80", "http://", "http://host/path"])
def test_an_address_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no address of a replica"):
        HttpClient(url)


@pytest.mark.parametrize("answer", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"])
def test_an_answer_that_is_no_whole_http_is_lost(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def work() -> None:
        listener = await asyncio.start_server(reply, "127.0.0.1", 0)
        client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        with pytest.raises(AnswerLostError):
            await client.ask("GET", "/", timeout_s=PATIENCE_S)
        listener.close()
        await listener.wait_closed()
        with pytest.raises(NotSentError):
            await client.ask("GET", "/", timeout_s=PATIENCE_S)

    run(work())
