"""Online traffic of a run: round after round until it is stopped, and a log that survives kills and tells what happened."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from common.serving.coserving.objectives import Objective
from common.traffic.latency import RequestTimes
from common.traffic.log import DeviceSums, TrafficLog, device_sums, increase, read_traffic
from common.traffic.online import replay_until
from common.traffic.openai_stream import Target
from common.traffic.replay import ReplayOptions
from common.traffic.trace import Trace, TraceRequest
from tests.common.traffic.test_replay import server, stream

TRACE = Trace(
    name="short",
    requests=tuple(TraceRequest(arrival_s=0.01 * idx, prompt_tokens=4, output_tokens=2) for idx in range(3)),
    span_s=0.05,
)
OBJECTIVE = Objective(ttft_s=5.0, tpot_s=5.0)


async def traffic_until(num_done: int, handler: Any, *, grace_s: float = 5.0) -> tuple[list[dict[str, Any]], list[RequestTimes]]:
    """Bodies that the server got and what became of them, of traffic that is stopped after so many ends."""
    bodies: list[dict[str, Any]] = []
    done: list[RequestTimes] = []
    stop = asyncio.Event()

    async def noting(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        bodies.append(body)
        if len(bodies) >= num_done:
            stop.set()
        await handler(body, writer)

    async with server(noting) as url:
        options = ReplayOptions(vocab_size=1000, grace_s=grace_s)
        await replay_until(stop, TRACE, lambda: Target(url=url, model="m"), options, done.append)
    return bodies, done


def test_rounds_follow_each_other_with_prompts_of_their_own() -> None:
    bodies, done = asyncio.run(traffic_until(7, stream))
    assert len(done) == len(bodies) >= 7
    assert all(times.whole for times in done)
    prompts = {tuple(body["prompt"]) for body in bodies}
    assert len(prompts) == len(bodies)
    assert len({body["seed"] for body in bodies}) == len(bodies)
    arrivals = sorted(times.arrival_s for times in done)
    assert arrivals[3] - arrivals[0] == pytest.approx(TRACE.span_s)


def test_what_is_under_way_when_the_traffic_stops_is_waited_for() -> None:
    async def slow(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        await stream(body, writer)

    _, done = asyncio.run(traffic_until(2, slow))
    assert len(done) >= 2
    assert all(times.whole for times in done)


def test_what_never_ends_is_given_up_and_has_missed() -> None:
    async def never(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    bodies, done = asyncio.run(traffic_until(2, never, grace_s=0.1))
    assert len(done) == len(bodies) >= 2
    assert not any(times.meets(OBJECTIVE) for times in done)
    assert {times.error for times in done} == {"unfinished when the replay ended"}


def test_a_server_that_moves_is_found_again_with_the_next_round() -> None:
    async def main() -> list[RequestTimes]:
        done: list[RequestTimes] = []
        stop = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(server(stream))
            second = await stack.enter_async_context(server(stream))
            urls = iter([first, "http://127.0.0.1:1"])

            def on_done(times: RequestTimes) -> None:
                done.append(times)
                if len(done) == 9:
                    stop.set()

            await replay_until(
                stop, TRACE, lambda: Target(url=next(urls, second), model="m"), ReplayOptions(vocab_size=10), on_done
            )
        return done

    done = sorted(asyncio.run(main()), key=lambda times: times.arrival_s)
    assert [times.whole for times in done[:9]] == [True] * 3 + [False] * 3 + [True] * 3


def times_of(arrival_s: float, *, token_s: list[float]) -> RequestTimes:
    return RequestTimes(
        arrival_s=arrival_s, prompt_tokens=4, output_tokens=2, sent_s=arrival_s, token_s=token_s, whole=len(token_s) == 2
    )


def test_rows_say_which_requests_met_their_objectives(tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "traffic" / "a.jsonl", Objective(ttft_s=1.0, tpot_s=0.5))
    log.start(TRACE)
    log.request(times_of(100.0, token_s=[100.5, 100.75]))
    log.request(times_of(100.0, token_s=[101.5, 101.75]))
    log.request(times_of(100.0, token_s=[100.5]))
    start, *requests = read_traffic(tmp_path / "traffic" / "a.jsonl")
    assert (start["kind"], start["ttft_s"], start["tpot_s"], start["trace"]) == ("start", 1.0, 0.5, "short")
    assert [(row["ttft_s"], row["tpot_s"], row["met"]) for row in requests] == [
        (0.5, 0.25, True),
        (1.5, 0.25, False),
        (0.5, None, False),
    ]


def test_a_torn_row_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    TrafficLog(path, OBJECTIVE).start(TRACE)
    with path.open("a") as file:
        file.write('{"kind": "request", "at_')
    TrafficLog(path, OBJECTIVE).start(TRACE)
    assert [row["kind"] for row in read_traffic(path)] == ["start", "start"]


@pytest.mark.parametrize(("sums", "grown"), [([], 0), ([5], 0), ([5, 8, 8], 3), ([5, 8, 2, 4], 7), ([0.0, 1.5], 1.5)])
def test_a_sum_that_starts_again_keeps_what_it_had_reached(sums: list[float], grown: float) -> None:
    assert increase(sums) == grown


METRICS = """\
rose_coserving_level{level="open"} 0.0
rose_coserving_level{level="stopped"} 1.0
# TYPE rose_coserving_level_seconds counter
rose_coserving_level_seconds_total{level="open"} 3.0
# TYPE rose_coserving_device_seconds counter
rose_coserving_device_seconds_total{work="rollout"} 2.0
# TYPE rose_coserving_work counter
rose_coserving_work_total{work="park"} 1.0
# TYPE rose_tokens counter
rose_tokens_total{interface="rollout",kind="prompt"} 50.0
rose_tokens_total{interface="rollout",kind="completion"} 7.0
"""


def test_the_sums_of_a_device_are_read_from_its_fronts_metrics() -> None:
    assert device_sums(METRICS) == DeviceSums(
        level="stopped", level_s={"open": 3.0}, device_s={"rollout": 2.0}, num_done={"park": 1.0}, rollout_tokens=7.0
    )
    assert device_sums('rose_tokens_total{interface="rollout",kind="completion"} 7.0\n') is None
