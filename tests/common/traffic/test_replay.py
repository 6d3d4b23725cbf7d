"""Replay against a server of a few lines: open loop, latencies from the trace's arrival, and one outcome for each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from common.serving.coserving.objectives import Objective
from common.traffic.latency import RequestTimes, attainment, summary
from common.traffic.openai_stream import ServerError, Target, get, served_model
from common.traffic.replay import ReplayOptions, prompt_of, replay
from common.traffic.trace import Trace, TraceRequest

Handler = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """Answers GET /v1/models and /metrics (100 rollout tokens more each time) itself and hands bodies of POSTs to `handler`."""
    polls: list[int] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        size = next(int(line.split(":")[1]) for line in head.splitlines() if line.lower().startswith("content-length"))
        body = await reader.readexactly(size)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            if head.startswith("GET /metrics"):
                polls.append(1)
                counter = f'rose_tokens_total{{interface="rollout",kind="completion"}} {100.0 * len(polls)}\n'
                writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(counter)}\r\n\r\n{counter}".encode())
            elif head.startswith("GET"):
                answer(writer, 200, {"data": [{"id": "m"}]})
            else:
                await handler(json.loads(body), writer)
        writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"


def answer(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    payload = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} OK\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload)


def event(writer: asyncio.StreamWriter, data: str) -> None:
    """One server-sent event, cut into two chunks in the middle."""
    payload = f"data: {data}\n\n".encode()
    for part in (payload[:7], payload[7:]):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


def begin(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")


async def stream(body: dict[str, Any], writer: asyncio.StreamWriter, *, num_tokens: int | None = None) -> None:
    begin(writer)
    count = body["max_tokens"] if num_tokens is None else num_tokens
    for _ in range(count):
        event(writer, json.dumps({"choices": [{"text": "a", "finish_reason": None}], "usage": None}))
        await writer.drain()
    event(writer, json.dumps({"choices": [{"text": "", "finish_reason": "length"}]}))
    event(writer, json.dumps({"choices": [], "usage": {"completion_tokens": count}}))
    event(writer, "[DONE]")
    writer.write(b"0\r\n\r\n")


def trace(*arrivals_s: float, output_tokens: int = 3) -> Trace:
    requests = tuple(TraceRequest(arrival_s=at_s, prompt_tokens=4, output_tokens=output_tokens) for at_s in arrivals_s)
    return Trace(name="t", requests=requests, span_s=arrivals_s[-1])


def run(handler: Handler, work: Callable[[Target], Awaitable[Any]]) -> Any:
    async def serve() -> Any:
        async with server(handler) as url:
            return await work(Target(url=url, model="m"))

    return asyncio.run(asyncio.wait_for(serve(), 60))


def test_every_request_gets_its_tokens_and_asks_for_exactly_the_traces_lengths() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        await stream(body, writer)

    times = run(handler, lambda target: replay(trace(0.0, 0.01, 0.02), target))
    assert [(len(entry.token_s), entry.whole, entry.error) for entry in times] == [(3, True, None)] * 3
    assert all(entry.ttft_s is not None and entry.ttft_s > 0 for entry in times)
    assert {(len(body["prompt"]), body["max_tokens"], body["ignore_eos"]) for body in bodies} == {(4, 3, True)}


def test_requests_are_sent_whether_or_not_those_before_them_were_answered() -> None:
    num_seen = 0
    all_seen = asyncio.Event()

    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 3:
            all_seen.set()
        await all_seen.wait()  # a closed loop would wait for the first answer for ever
        await stream(body, writer)

    times = run(handler, lambda target: replay(trace(0.0, 0.01, 0.02), target))
    assert all(entry.whole for entry in times)


def test_ttft_counts_from_the_traces_arrival_not_from_when_it_was_sent() -> None:
    late = RequestTimes(arrival_s=1.0, prompt_tokens=1, output_tokens=3, sent_s=5.0, token_s=[6.0, 6.5, 7.5], whole=True)
    assert (late.ttft_s, late.tpot_s, late.longest_gap_s) == (5.0, 0.75, 1.0)


def test_failures_have_an_outcome_each_and_count_as_missed() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        match body["seed"]:
            case 0:
                answer(writer, 503, {"error": {"message": "draining"}})
            case 1:
                begin(writer)
                event(writer, json.dumps({"error": {"message": "the engine failed"}}))
            case 2:
                await stream(body, writer, num_tokens=1)
            case 3:
                begin(writer)  # and then nothing
            case 4:
                await asyncio.sleep(3600)
            case _:
                await stream(body, writer)

    options = ReplayOptions(grace_s=1.0)
    times = run(handler, lambda target: replay(trace(*[0.01 * number for number in range(6)]), target, options))
    assert [entry.whole for entry in times] == [False] * 5 + [True]
    words = ["status 503", "the engine failed", "1 tokens instead of 3", "IncompleteReadError", "unfinished"]
    for entry, expected in zip(times, words, strict=False):
        assert entry.error is not None
        assert expected in entry.error
    generous = Objective(ttft_s=100.0, tpot_s=100.0)
    assert attainment(times, lambda _: generous) == pytest.approx(1 / 6)
    assert summary(times)["num_whole"] == 1


def test_a_server_that_is_not_there_is_an_outcome_too() -> None:
    times = asyncio.run(replay(trace(0.0), Target(url="http://127.0.0.1:9", model="m")))
    assert times[0].error is not None
    assert "Error" in times[0].error
    assert not times[0].whole


def test_the_model_is_asked_for_and_refusals_are_quoted() -> None:
    async def handler(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        raise AssertionError(body)

    async def ask(target: Target) -> str:
        with pytest.raises(ValueError, match="no address of a server"):
            await get("127.0.0.1:1", "/metrics")
        return await served_model(target.url)

    assert run(handler, ask) == "m"
    assert issubclass(ServerError, Exception)


def test_prompts_of_one_session_begin_alike_and_others_do_not() -> None:
    options = ReplayOptions(vocab_size=1000)
    first, longer = (TraceRequest(arrival_s=0, prompt_tokens=n, output_tokens=1, session_id="s") for n in (50, 80))
    alone = TraceRequest(arrival_s=0, prompt_tokens=50, output_tokens=1)
    assert prompt_of(longer, 1, options)[:50] == prompt_of(first, 0, options)
    assert prompt_of(alone, 0, options) != prompt_of(alone, 1, options)
    assert prompt_of(alone, 0, options) == prompt_of(alone, 0, options)


def test_attainment_of_every_gap_is_stricter() -> None:
    uneven = RequestTimes(arrival_s=0.0, prompt_tokens=1, output_tokens=4, token_s=[0.1, 0.11, 0.12, 0.4], whole=True)
    objective = Objective(ttft_s=0.2, tpot_s=0.15)
    assert uneven.meets(objective)
    assert not uneven.meets(objective, every_gap=True)
    single = RequestTimes(arrival_s=0.0, prompt_tokens=1, output_tokens=1, token_s=[0.1], whole=True)
    assert single.meets(objective, every_gap=True)
