"""What the front costs: TTFT and TPOT over HTTP beside the engine alone, and whether parsing ever delays a step.

    python -m scripts.bench_front [--config=configs/frozenlake_cpu.py] [--model=DIR] [--backend=jetstream] [--out=front.json]

latency: the same greedy completions by the same number of streams, once by an engine in this process and once streamed over HTTP
from a replica process, in turn, `--rounds` times. parsing: gaps between the ends of engine steps while streams decode, without and
with clients that send large JSON bodies all the time, in turn. Client, front and engine share the machine's cores, so with fewer
than three cores whatever one does the others wait for.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from absl import flags

from common.config import Config, validate
from common.serving.engine import StepResult
from common.types import Request, SamplingKey, SamplingParams
from scripts import entry
from scripts.serving_process import ServingProcess, Streamed, percentile, post, stream_completion

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/frozenlake_cpu.py")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder; default: a random model.", flag_values=_FLAGS)
_BACKEND = flags.DEFINE_enum("backend", "jetstream", ["jetstream", "vllm"], "Engine.", flag_values=_FLAGS)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Alternations.", flag_values=_FLAGS)
_STREAMS = flags.DEFINE_list("streams", ["1", "8"], "Numbers of streams.", flag_values=_FLAGS)
_REQUESTS = flags.DEFINE_integer("requests", 16, "Completions of each stream and round.", flag_values=_FLAGS)
_BODIES = flags.DEFINE_integer("bodies", 50, "Large bodies on their way at a time.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.", flag_values=_FLAGS)

PROMPT_TOKENS, COMPLETION_TOKENS = 24, 48
BODY_TOKENS = 200_000
"""Of a large body: a megabyte of JSON that is parsed, then refused as longer than the context."""
PHASE_S = 4.0
"""Of the parsing part: with steps of milliseconds, the engine remembers more of them than fit in."""

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


async def parsing(server: ServingProcess, num_streams: int) -> list[Row]:
    """Gaps between engine steps while `num_streams` streams decode, without and with large bodies being parsed."""
    over_http = OverHttp(server)
    stop = asyncio.Event()

    async def decode(stream_idx: int) -> None:
        request_idx = 0
        while not stop.is_set():
            await over_http.complete(stream_idx, request_idx)
            request_idx += 1

    payload = json.dumps({"model": server.model, "prompt": [1] * BODY_TOKENS}).encode()
    num_parsed = 0

    async def send(stop_sending: asyncio.Event) -> None:
        nonlocal num_parsed
        while not stop_sending.is_set():
            _, writer, status = await post(server.address, "/v1/completions", payload)
            writer.close()
            if status != 400:
                raise ValueError(f"a body longer than the context was answered with {status}")
            num_parsed += 1

    decoding = [asyncio.create_task(decode(stream_idx)) for stream_idx in range(num_streams)]
    gaps_ms: dict[str, list[float]] = {"quiet": [], "parsing": []}
    for _ in range(_ROUNDS.value):
        for name in gaps_ms:
            stop_sending = asyncio.Event()
            senders = [asyncio.create_task(send(stop_sending)) for _ in range(_BODIES.value if name == "parsing" else 0)]
            await asyncio.sleep(PHASE_S / 4)
            started_s = time.monotonic()
            await asyncio.sleep(PHASE_S)
            ends_s = await asyncio.to_thread(server.step_ends_s)
            stop_sending.set()
            await asyncio.gather(*senders)
            kept = [end_s for end_s in ends_s if end_s >= started_s]
            gaps_ms[name] += [1e3 * (after - before) for before, after in itertools.pairwise(kept)]
    stop.set()
    await asyncio.gather(*decoding)
    return [
        {
            "what": name,
            "streams": num_streams,
            "steps": len(gaps),
            "gap_p50_ms": percentile(gaps, 0.5),
            "gap_p99_ms": percentile(gaps, 0.99),
            "gap_max_ms": max(gaps),
            "bodies_parsed": num_parsed if name == "parsing" else 0,
        }
        for name, gaps in gaps_ms.items()
    ]


async def measure(config: Config, server: ServingProcess) -> dict[str, list[Row]]:
    alone = EngineAlone(config)
    await alone.start()
    try:
        rows = {"latency": await latency(alone, OverHttp(server))}
    finally:
        await alone.replica.__aexit__(None, None, None)
    return rows | {"parsing": await parsing(server, max(map(int, _STREAMS.value)))}


def main() -> None:
    config: Config = _CONFIG.value
    config.model.checkpoint = _MODEL.value or config.model.checkpoint
    config.sampler.backend, config.sampler.tokens_per_sequence = _BACKEND.value, 1
    validate(config)
    arguments = [*entry.config_arguments(), f"--backend={_BACKEND.value}", *([f"--model={_MODEL.value}"] if _MODEL.value else [])]
    with ServingProcess(arguments) as server:
        result = asyncio.run(measure(config, server))
    for part, rows in result.items():
        print(f"\n{part}")
        for row in rows:
            print("  " + "  ".join(f"{key} {f'{value:.3g}' if isinstance(value, float) else value}" for key, value in row.items()))
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    entry.run(main)
