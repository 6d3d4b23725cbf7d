"""What the front costs: TTFT and TPOT over HTTP beside the engine alone, and whether parsing ever delays a step.

    python -m scripts.bench_front [--config=configs/frozenlake_cpu.py] [--model=DIR] [--backend=jetstream] [--out=front.json]

latency: the same greedy completions by the same number of streams, once by an engine in this process and once streamed over HTTP
from a replica process, in turn, `--rounds` times; client, front and engine share the machine's cores, so with fewer than three
whatever one does the others wait for. parsing: gaps between the ends of engine steps while the engine has more to do than it can,
without and with clients that send large JSON bodies all the time, in turn; the engine has one core and one thread of its own there.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import statistics
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from absl import flags

from common.config import Config, validate
from common.serving.engine import StepResult
from common.types import Request, SamplingKey, SamplingParams
from scripts import entry
from scripts.coserving_processes import ONE_THREAD
from scripts.serving_process import ServingProcess, Streamed, percentile, post, stream_completion

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/frozenlake_cpu.py")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder; default: a random model.", flag_values=_FLAGS)
_BACKEND = flags.DEFINE_enum("backend", "jetstream", ["jetstream", "vllm"], "Engine.", flag_values=_FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Alternations.", flag_values=_FLAGS)
_STREAMS = flags.DEFINE_list("streams", ["1", "8"], "Numbers of streams.", flag_values=_FLAGS)
_REQUESTS = flags.DEFINE_integer("requests", 16, "Completions of each stream and round.", flag_values=_FLAGS)
_BODIES = flags.DEFINE_integer("bodies", 8, "Large bodies on their way at a time.", flag_values=_FLAGS)
_WAVES = flags.DEFINE_integer("waves", 40, "Rollouts that wait in the parsing part, in slots of the engine.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.", flag_values=_FLAGS)

PROMPT_TOKENS, COMPLETION_TOKENS = 24, 48
BODY_TOKENS = 200_000
"""Of a large body: a megabyte of JSON that is parsed, then refused as longer than the context."""
PHASE_S = 4.0
"""Of one phase of the parsing part: with steps of milliseconds, the engine remembers more of them than fit in."""
FULL_SHARE = 0.8
"""Of the waiting rollouts, when a phase may begin."""

Row = dict[str, Any]


def prompt(stream_idx: int, request_idx: int, vocab_size: int) -> list[int]:
    """Token ids that no other request begins with, special ones left out."""
    return [
        10 + (stream_idx * 7919 + request_idx * 104_729 + position * 31) % (vocab_size - 10) for position in range(PROMPT_TOKENS)
    ]


class EngineAlone:
    """The replica that scripts.serve runs, in this process and without a front."""

    def __init__(self, config: Config) -> None:
        from scripts.serve_engine import StoreOptions, make_served_replica

        self.replica = make_served_replica(config, "alone", StoreOptions(address=None, token=None, ca=None))
        self._streams: dict[str, Streamed] = {}

    async def start(self) -> None:
        await self.replica.__aenter__()
        await self.replica.stage()
        await self.replica.commit()
        if _BACKEND.value == "jetstream":
            self.replica.engine.warm_up()
        self.replica.watch_steps(self._on_step)

    def _on_step(self, result: StepResult) -> None:
        now_s = time.monotonic()
        for token in result.tokens:
            self._streams[token.request_id].arrivals_s.append(now_s)

    async def complete(self, stream_idx: int, request_idx: int) -> Streamed:
        request_id = f"{stream_idx}.{request_idx}"
        self._streams[request_id] = Streamed(sent_s=time.monotonic())
        await self.replica.generate(
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt(stream_idx, request_idx, self.replica.engine.info.vocab_size)),
                sampling=SamplingParams(max_tokens=COMPLETION_TOKENS, temperature=0.0),
                key=SamplingKey(run_seed=0, trajectory_id=0, turn_idx=0),
            )
        )
        return self._streams.pop(request_id)


class OverHttp:
    """The same completions from a replica process."""

    def __init__(self, server: ServingProcess) -> None:
        self._server, self._vocab_size = server, server.status()["vocab_size"]

    async def complete(self, stream_idx: int, request_idx: int) -> Streamed:
        body = {
            "model": self._server.model,
            "prompt": prompt(stream_idx, request_idx, self._vocab_size),
            "max_tokens": COMPLETION_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        return await stream_completion(self._server.address, body)


async def one_round(client: EngineAlone | OverHttp, num_streams: int, first_request: int) -> list[Streamed]:
    """Every stream completes its requests one after the other."""

    async def stream(stream_idx: int) -> list[Streamed]:
        return [await client.complete(stream_idx, first_request + idx) for idx in range(_REQUESTS.value)]

    return [streamed for of_stream in await asyncio.gather(*map(stream, range(num_streams))) for streamed in of_stream]


async def latency(alone: EngineAlone, over_http: OverHttp) -> list[Row]:
    rows: list[Row] = []
    for num_streams in map(int, _STREAMS.value):
        found: dict[str, list[list[Streamed]]] = {"engine alone": [], "over HTTP": []}
        for round_idx in range(_ROUNDS.value + 1):
            for name, client in (("engine alone", alone), ("over HTTP", over_http)):
                found[name].append(await one_round(client, num_streams, round_idx * _REQUESTS.value))
        for name, rounds in found.items():
            measured = rounds[1:]  # the first one warms up
            together = [streamed for of_round in measured for streamed in of_round]
            ttft_s, tpot_s = [s.ttft_s for s in together], [s.tpot_s for s in together]
            medians_s = [statistics.median(s.ttft_s for s in of_round) for of_round in measured]
            rows.append(
                {
                    "what": name,
                    "streams": num_streams,
                    "ttft_p50_ms": 1e3 * percentile(ttft_s, 0.5),
                    "ttft_p99_ms": 1e3 * percentile(ttft_s, 0.99),
                    "tpot_p50_ms": 1e3 * percentile(tpot_s, 0.5),
                    "tpot_p99_ms": 1e3 * percentile(tpot_s, 0.99),
                    "ttft_p50_ms_of_rounds": [1e3 * value for value in medians_s],
                }
            )
    return rows


class Backlog:
    """More rollouts than the engine does in a phase, so that no step waits for the front to bring work. Use as `async with`."""

    def __init__(self, server: ServingProcess) -> None:
        status = server.status()
        self._server, self._num_slots, self._vocab_size = server, status["max_slots"], status["vocab_size"]
        self._max_tokens = status["max_context_tokens"] - PROMPT_TOKENS
        self._calls: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> None:
        num_calls = _WAVES.value * self._num_slots
        self._calls = [asyncio.create_task(self._repeat(idx)) for idx in range(num_calls)]
        while (await self.num_waiting()) < FULL_SHARE * num_calls:
            for call in self._calls:
                if call.done():
                    call.result()  # none ends by itself
            await asyncio.sleep(0.1)

    async def num_waiting(self) -> int:
        return (await asyncio.to_thread(self._server.status))["load"]["engine"]["waiting_requests"]

    async def _repeat(self, idx: int) -> None:
        """One rollout after the other."""
        for turn_idx in itertools.count():
            body = {
                "call_id": secrets.token_hex(8),
                "prompt_token_ids": prompt(idx, turn_idx, self._vocab_size),
                "sampling": {"max_tokens": self._max_tokens},
                "key": {"run_seed": 0, "trajectory_id": idx, "turn_idx": turn_idx},
            }
            payload = json.dumps(body).encode()
            reader, writer, status = await post(self._server.address, "/rollout/v1/generate", payload, self._server.rollout_token)
            with contextlib.closing(writer):
                await reader.read()
            if status != 200:
                raise ValueError(f"a rollout was answered with {status}")

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


async def gaps_ms(server: ServingProcess, num_bodies: int) -> tuple[list[float], int]:
    """Gaps between the steps of one phase while `num_bodies` large bodies are on their way, and how many were parsed."""
    payload = json.dumps({"model": server.model, "prompt": [1] * BODY_TOKENS}).encode()
    num_parsed = 0

    async def send() -> None:
        nonlocal num_parsed
        while True:
            _, writer, status = await post(server.address, "/v1/completions", payload)
            writer.close()
            if status != 400:
                raise ValueError(f"a body longer than the context was answered with {status}")
            num_parsed += 1

    backlog = Backlog(server)
    async with backlog:
        senders = [asyncio.create_task(send()) for _ in range(num_bodies)]
        await asyncio.sleep(PHASE_S / 4)
        started_s, num_before = time.monotonic(), num_parsed
        await asyncio.sleep(PHASE_S)
        ended_s, num_parsed_then = time.monotonic(), num_parsed
        ends_s = await asyncio.to_thread(server.step_ends_s)
        num_waiting = await backlog.num_waiting()
        for sender in senders:
            sender.cancel()
        for outcome in await asyncio.gather(*senders, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
    if not num_waiting:
        raise ValueError(f"the engine ran out of rollouts in {PHASE_S:g} s; raise --waves={_WAVES.value}")
    if num_bodies and num_parsed_then == num_before:
        raise ValueError(f"no body was parsed in {PHASE_S:g} s, so this measures nothing: the machine is too busy")
    kept = [end_s for end_s in ends_s if started_s <= end_s <= ended_s]
    return [1e3 * (after - before) for before, after in itertools.pairwise(kept)], num_parsed_then - num_before


async def parsing(server: ServingProcess) -> list[Row]:
    """Gaps between the steps of a loaded engine, without and with large bodies being parsed."""
    engine_core, *others = sorted(os.sched_getaffinity(0))
    if others:
        pin(server.pids["engine"], {engine_core})
        pin(server.pids["front"], set(others))
        pin(os.getpid(), set(others))
    found: dict[str, list[float]] = {"quiet": [], "parsing": []}
    num_parsed = dict.fromkeys(found, 0)
    for _ in range(_ROUNDS.value):
        for name in found:
            gaps, num_bodies = await gaps_ms(server, _BODIES.value if name == "parsing" else 0)
            found[name] += gaps
            num_parsed[name] += num_bodies
    return [
        {
            "what": name,
            "steps": len(gaps),
            "gap_p50_ms": percentile(gaps, 0.5),
            "gap_p99_ms": percentile(gaps, 0.99),
            "gap_max_ms": max(gaps),
            "bodies_parsed": num_parsed[name],
        }
        for name, gaps in found.items()
    ]


def pin(pid: int, cores: set[int]) -> None:
    """Keep every thread of a process on some cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


async def beside_engine_alone(config: Config, server: ServingProcess) -> list[Row]:
    alone = EngineAlone(config)
    await alone.start()
    try:
        return await latency(alone, OverHttp(server))
    finally:
        await alone.replica.__aexit__(None, None, None)


def main() -> None:
    config: Config = _CONFIG.value
    config.model.checkpoint = _MODEL.value or config.model.checkpoint
    config.sampler.backend, config.sampler.tokens_per_sequence = _BACKEND.value, 1
    validate(config)
    arguments = [*entry.config_arguments(), f"--backend={_BACKEND.value}", *([f"--model={_MODEL.value}"] if _MODEL.value else [])]
    arguments.append(f"--max_completions_per_client={2 * _WAVES.value * config.sampler.max_slots}")  # the backlog is one client's
    with ServingProcess(arguments) as server:
        result = {"latency": asyncio.run(beside_engine_alone(config, server))}
    with ServingProcess(arguments, environment=ONE_THREAD) as server:  # threads that share a core wait for each other in turns
        result["parsing"] = asyncio.run(parsing(server))
    for part, rows in result.items():
        print(f"\n{part}")
        for row in rows:
            print("  " + "  ".join(f"{key} {f'{value:.3g}' if isinstance(value, float) else value}" for key, value in row.items()))
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    entry.run(main)
