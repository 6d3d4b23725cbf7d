"""Open-loop replay: every request of a trace is sent when the trace says, whether or not those before it were answered.

Latencies count from the trace's arrival time on the client's clock; `sent_s` shows how late the generator itself was. Prompts are
random token ids of the trace's lengths, the same for the same seed; those of one session begin alike. Outputs are forced to the
trace's lengths. Invariant: each request of the trace ends up with exactly one RequestTimes, failed and unfinished ones included.
"""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from common.clock import Clock, MonotonicClock
from common.errors import RoseError
from common.traffic.latency import RequestTimes
from common.traffic.openai_stream import Target, stream_completion
from common.traffic.trace import Trace, TraceRequest

LEAD_S = 0.5
"""From the call to the trace's time zero, so that its first requests are not late."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """`vocab_size` bounds the token ids of prompts; `grace_s`: how long after the window answers are waited for."""

    vocab_size: int = 256
    seed: int = 0
    grace_s: float = 30.0


async def replay(
    trace: Trace,
    target: Target,
    options: ReplayOptions | None = None,
    *,
    on_done: Callable[[RequestTimes], None] | None = None,
    clock: Clock | None = None,
    start_s: float | None = None,
) -> list[RequestTimes]:
    """Replay a trace; returns what became of its requests, in order of arrival.

    Args:
        start_s: the trace's zero on `clock`, for traces that run together; default: a moment from now.
    """
    options, clock = options or ReplayOptions(), clock or MonotonicClock()
    zero_s = clock.now_s() + LEAD_S if start_s is None else start_s
    times = [
        RequestTimes(arrival_s=zero_s + request.arrival_s, prompt_tokens=request.prompt_tokens, output_tokens=request.output_tokens)
        for request in trace.requests
    ]
    tasks: list[asyncio.Task[None]] = []
    for idx, (request, entry) in enumerate(zip(trace.requests, times, strict=True)):
        prompt = prompt_of(request, idx, options)
        await asyncio.sleep(max(0.0, entry.arrival_s - clock.now_s()))
        tasks.append(asyncio.create_task(send(target, prompt, entry, options.seed + idx, clock, on_done)))
    if tasks:
        end_s = zero_s + trace.span_s + options.grace_s
        await asyncio.wait(tasks, timeout=max(0.0, end_s - clock.now_s()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times


def prompt_of(request: TraceRequest, idx: int, options: ReplayOptions) -> list[int]:
    """Token ids of a request's prompt: its own, or the beginning of its session's."""
    source = [idx] if request.session_id is None else [1 << 32, zlib.crc32(request.session_id.encode())]
    rng = np.random.default_rng([options.seed, *source])
    return rng.integers(0, options.vocab_size, request.prompt_tokens).tolist()


async def send(
    target: Target,
    prompt: list[int],
    entry: RequestTimes,
    seed: int,
    clock: Clock,
    on_done: Callable[[RequestTimes], None] | None,
) -> None:
    """Send one request and note in `entry` what became of it; cancelling gives it up, which is noted too."""
    entry.sent_s = clock.now_s()
    try:
        num_generated = await stream_completion(
            target, prompt, entry.output_tokens, lambda: entry.token_s.append(clock.now_s()), seed=seed
        )
        entry.whole = num_generated == entry.output_tokens
        if not entry.whole:
            entry.error = f"{num_generated} tokens instead of {entry.output_tokens}"
    except asyncio.CancelledError:
        entry.error = "unfinished when the replay ended"
        raise
    except (RoseError, OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
        entry.error = f"{type(error).__name__}: {error}"
    finally:
        if on_done is not None:
            on_done(entry)
