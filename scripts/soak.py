"""A replica process under good, bad, aborted and slow requests: nothing leaks, no answer is wrong, good requests hardly notice.

    python -m scripts.soak [--config=configs/frozenlake_cpu.py] [--model=DIR] [--backend=jetstream] [--minutes=10] [--out=soak.json]

First a quarter of the time with good requests alone, then the rest with all kinds. Good ones are greedy and come at a fixed rate,
whatever the server does; each answer is compared with what the engine gave for the same prompt with nothing beside it. Memory, open
files, slots and cache are read from outside all the time; the last reading comes when every client is gone. Exit status 1 if an
answer was wrong, a good request failed, or something was not given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from scripts import entry
from scripts.serving_process import ServingProcess, Streamed, percentile, post, request_bytes, stream_completion

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS, "configs/frozenlake_cpu.py")
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder; default: a random model.", flag_values=_FLAGS)
_BACKEND = flags.DEFINE_enum("backend", "jetstream", ["jetstream", "vllm"], "Engine.", flag_values=_FLAGS)
_MINUTES = flags.DEFINE_float("minutes", 10.0, "Duration of both parts together.", flag_values=_FLAGS)
_RATE = flags.DEFINE_float("rate", 8.0, "Good requests a second.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.", flag_values=_FLAGS)

NUM_PROMPTS = 64
PROMPT_TOKENS, COMPLETION_TOKENS = 20, 32
NUM_ABORTING, NUM_SLOW, NUM_MALFORMED, NUM_IDLE = 4, 4, 2, 100
"""Clients of each other kind that are there all the time."""
READING_INTERVAL_S = 5.0
SETTLE_S = 3.0
"""After the last client: for the server to see that they are gone."""
MAX_MEMORY_GROWTH_BYTES = 64 << 20
"""Between the first third of the mixed part and its end: allocators keep what one peak needed, a leak goes on."""

MAX_EXTRA_FILES = 2
"""The connection of the reading itself may be on its way out."""

MALFORMED = (
    b"",
    b"{",
    b"[" * 10_000,
    b'{"model": 1}',
    b'{"model": "\\ud800", "prompt": "go"}',
    b'{"model": "no such model", "prompt": "go"}',
    b'{"prompt": ' + b"1" * 100_000 + b"}",
)


@dataclasses.dataclass
class Reading:
    """What the two processes hold at one moment."""

    at_s: float
    rss_bytes: dict[str, int]
    open_files: dict[str, int]
    running: int
    waiting: int
    used_cache_tokens: int


@dataclasses.dataclass
class Tally:
    """What came of the requests of one part."""

    good: list[Streamed] = dataclasses.field(default_factory=list)
    wrong: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    others: dict[str, int] = dataclasses.field(default_factory=dict)

    def count(self, kind: str) -> None:
        self.others[kind] = self.others.get(kind, 0) + 1


class Soak:
    """One server, its prompts and their right answers."""

    def __init__(self, server: ServingProcess) -> None:
        self._server = server
        vocab_size = server.status()["vocab_size"]
        rng = random.Random(0)
        self._prompts = [[rng.randrange(6, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
        self._expected: list[str] = []
        self.readings: list[Reading] = []

    def body(self, prompt_idx: int, **fields: Any) -> dict[str, Any]:
        return {
            "model": self._server.model,
            "prompt": self._prompts[prompt_idx % NUM_PROMPTS],
            "max_tokens": COMPLETION_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }

    async def learn_answers(self) -> None:
        """Each prompt alone in the engine."""
        for prompt_idx in range(NUM_PROMPTS):
            self._expected.append((await stream_completion(self._server.address, self.body(prompt_idx))).text)

    async def run(self, duration_s: float, *, mixed: bool) -> Tally:
        """One part; every client is gone when it returns."""
        tally = Tally()
        disturbers = []
        if mixed:
            disturbers += [asyncio.create_task(self._abort(tally, random.Random(idx))) for idx in range(NUM_ABORTING)]
            disturbers += [asyncio.create_task(self._read_slowly(tally, idx)) for idx in range(NUM_SLOW)]
            disturbers += [asyncio.create_task(self._malformed(tally)) for _ in range(NUM_MALFORMED)]
            disturbers += [asyncio.create_task(self._idle(tally)) for _ in range(NUM_IDLE)]
        reading = asyncio.create_task(self._keep_reading())
        started_s = time.monotonic()
        good: list[asyncio.Task[None]] = []
        while time.monotonic() < started_s + duration_s:
            good.append(asyncio.create_task(self._good(tally, len(good))))
            await asyncio.sleep(max(0.0, started_s + len(good) / _RATE.value - time.monotonic()))
        await asyncio.gather(*good)
        for task in (*disturbers, reading):
            task.cancel()
        await asyncio.gather(*disturbers, reading, return_exceptions=True)
        return tally

    async def _good(self, tally: Tally, idx: int) -> None:
        try:
            streamed = await stream_completion(self._server.address, self.body(idx))
        except (ValueError, OSError) as error:
            tally.failed.append(str(error))
            return
        tally.good.append(streamed)
        tally.wrong += streamed.text != self._expected[idx % NUM_PROMPTS]

    async def _abort(self, tally: Tally, rng: random.Random) -> None:
        """Leaves after a few events, or before the first."""
        while True:
            payload = json.dumps(self.body(rng.randrange(NUM_PROMPTS), stream=True, n=rng.choice([1, 3]))).encode()
            reader, writer = await asyncio.open_connection(*self._server.address)
            writer.write(request_bytes("/v1/completions", payload))
            for _ in range(rng.randrange(12)):
                await reader.readline()
            writer.transport.abort()
            tally.count("aborted")
            await asyncio.sleep(rng.random() * 0.2)

    async def _read_slowly(self, tally: Tally, idx: int) -> None:
        """Takes a stream with many log-probabilities a little at a time, then leaves the rest."""
        while True:
            reader, writer, _ = await post(
                self._server.address, "/v1/completions", json.dumps(self.body(idx, stream=True, logprobs=5, n=4)).encode()
            )
            with contextlib.closing(writer):
                for _ in range(20):
                    await reader.read(200)
                    await asyncio.sleep(0.25)
            tally.count("slow")

    async def _malformed(self, tally: Tally) -> None:
        rng = random.Random(1)
        while True:
            _, writer, status = await post(self._server.address, "/v1/completions", rng.choice(MALFORMED))
            writer.close()
            if not 400 <= status < 500:
                tally.failed.append(f"a malformed request was answered with {status}")
            tally.count("malformed")
            await asyncio.sleep(0.05)

    async def _idle(self, tally: Tally) -> None:
        """Connects, says half a request at most, and waits to be thrown out."""
        while True:
            reader, writer = await asyncio.open_connection(*self._server.address)
            with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                writer.write(b"POST /v1/comp")
                await reader.read()
            tally.count("idle")

    async def _keep_reading(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(READING_INTERVAL_S)

    async def read(self) -> Reading:
        engine = (await asyncio.to_thread(self._server.status))["load"]["engine"]
        pids = self._server.pids
        reading = Reading(
            at_s=time.monotonic(),
            rss_bytes={name: _rss_bytes(pid) for name, pid in pids.items()},
            open_files={name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
            running=engine["running_requests"],
            waiting=engine["waiting_requests"],
            used_cache_tokens=engine["used_cache_tokens"],
        )
        self.readings.append(reading)
        return reading


def _rss_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def latency(tally: Tally) -> dict[str, float]:
    ttft_s, tpot_s = [streamed.ttft_s for streamed in tally.good], [streamed.tpot_s for streamed in tally.good]
    return {
        "good": len(tally.good),
        "ttft_p50_ms": 1e3 * percentile(ttft_s, 0.5),
        "ttft_p99_ms": 1e3 * percentile(ttft_s, 0.99),
        "tpot_p50_ms": 1e3 * percentile(tpot_s, 0.5),
        "tpot_p99_ms": 1e3 * percentile(tpot_s, 0.99),
    }


def problems(tallies: dict[str, Tally], before: Reading, settled: Reading, last: Reading) -> list[str]:
    """What must not be, in words; nothing if all is well."""
    found: list[str] = []
    for name, tally in tallies.items():
        if tally.wrong:
            found.append(f"{name}: {tally.wrong} wrong answers")
        if tally.failed:
            found.append(f"{name}: {len(tally.failed)} failures, the first: {tally.failed[0]}")
    if (last.running, last.waiting, last.used_cache_tokens) != (0, 0, 0):
        found.append(f"slots or cache were not given back: {last}")
    for name in last.open_files:
        if last.open_files[name] > before.open_files[name] + MAX_EXTRA_FILES:
            found.append(f"{name}: {last.open_files[name]} open files, {before.open_files[name]} before")
        growth_bytes = last.rss_bytes[name] - settled.rss_bytes[name]
        if growth_bytes > MAX_MEMORY_GROWTH_BYTES:
            found.append(f"{name}: memory grew by {growth_bytes >> 20} MiB, which is above {MAX_MEMORY_GROWTH_BYTES >> 20}")
    return found


async def measure(server: ServingProcess) -> dict[str, Any]:
    soak = Soak(server)
    await soak.learn_answers()
    await asyncio.sleep(SETTLE_S)
    before = await soak.read()
    duration_s = 60 * _MINUTES.value
    tallies = {"good alone": await soak.run(duration_s / 4, mixed=False)}
    num_before = len(soak.readings)
    tallies["mixed"] = await soak.run(duration_s * 3 / 4, mixed=True)
    await asyncio.sleep(SETTLE_S)
    settled = soak.readings[num_before + (len(soak.readings) - num_before) // 3]
    last = await soak.read()
    return {
        "latency": {name: latency(tally) for name, tally in tallies.items()},
        "others": tallies["mixed"].others,
        "before": dataclasses.asdict(before),
        "settled": dataclasses.asdict(settled),
        "last": dataclasses.asdict(last),
        "problems": problems(tallies, before, settled, last),
        "readings": [dataclasses.asdict(reading) for reading in soak.readings],
    }


def main() -> None:
    arguments = [*entry.config_arguments(), f"--backend={_BACKEND.value}", *([f"--model={_MODEL.value}"] if _MODEL.value else [])]
    with ServingProcess(arguments) as server:
        result = asyncio.run(measure(server))
    for name, row in result["latency"].items():
        print(f"{name:11} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
    print(f"others      {result['others']}")
    for name in ("before", "settled", "last"):
        print(f"{name:11} {result[name]}")
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")
    if result["problems"]:
        print("\n".join(result["problems"]), file=sys.stderr)
        sys.exit(1)
    print("Nothing leaked and no answer was wrong")


if __name__ == "__main__":
    entry.run(main)
