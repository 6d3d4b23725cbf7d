"""Online traffic of a run: the configured slice of a trace, sent over and over, open-loop, until told to stop.

Each round has prompts of its own, so that no round is spared work by what the one before left in a cache. Invariant: every request
that was sent is told of exactly once, failed and unfinished ones included; a request whose time had not come is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

from common.clock import Clock, MonotonicClock
from common.config import Config
from common.traffic.latency import RequestTimes
from common.traffic.openai_stream import Target
from common.traffic.replay import LEAD_S, ReplayOptions, prompt_of, send
from common.traffic.trace import Trace, load_trace

ROUND_SEEDS = 1 << 20
"""Seeds of one round: more than a slice has requests."""


def online_trace(config: Config) -> Trace:
    """The slice that `coserving.traffic` describes, scaled.

    Raises:
        ValueError: there is no such trace, nothing arrives in the slice, or a request is longer than the serving model's context.
    """
    traffic = config.coserving.traffic
    assert traffic.trace is not None
    try:
        trace = load_trace(traffic.trace).window(traffic.start_s, traffic.end_s)
    except ValueError as error:
        raise ValueError(f"coserving.traffic: {error}") from error
    trace = trace.scaled(time=traffic.time, prompts=traffic.prompts, outputs=traffic.outputs)
    longest = config.coserving.sampler.max_context_tokens
    if trace.longest_context > longest:
        raise ValueError(
            f"coserving.traffic: {trace.description} has a request of {trace.longest_context} tokens, above "
            f"coserving.sampler.max_context_tokens={longest}; lower coserving.traffic.prompts or outputs"
        )
    return trace


async def replay_until(
    stop: asyncio.Event,
    trace: Trace,
    target_of: Callable[[], Target],
    options: ReplayOptions,
    on_done: Callable[[RequestTimes], None],
    *,
    clock: Clock | None = None,
) -> None:
    """Send round after round until `stop` is set, then wait for what is under way, `options.grace_s` at most.

    Args:
        target_of: where the server is; asked at the beginning of each round, since one that was started again may have moved.
        on_done: told of each request when it has ended, in whatever order they end.
    """
    clock = clock or MonotonicClock()
    under_way: set[asyncio.Task[None]] = set()
    zero_s, round_idx = clock.now_s() + LEAD_S, 0
    while not stop.is_set():
        target = target_of()
        of_round = dataclasses.replace(options, seed=options.seed + round_idx * ROUND_SEEDS)
        for idx, request in enumerate(trace.requests):
            entry = RequestTimes(
                arrival_s=zero_s + request.arrival_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
            )
            prompt = prompt_of(request, idx, of_round)
            if await _stopped_before(stop, entry.arrival_s - clock.now_s()):
                break
            task = asyncio.create_task(send(target, prompt, entry, of_round.seed + idx, clock, on_done))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        zero_s += trace.span_s
        round_idx += 1
        await _stopped_before(stop, zero_s - clock.now_s())
    if under_way:
        await asyncio.wait(under_way, timeout=options.grace_s)
    rest = list(under_way)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


async def _stopped_before(stop: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until `stop` is set: whether it is."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
    return stop.is_set()
