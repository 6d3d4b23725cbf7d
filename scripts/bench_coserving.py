"""Co-serving on one core: what rollouts get in the gaps of live traffic, and which latency objectives are then missed.

    python -m scripts.bench_coserving --backend=jetstream --trace=azure2023_code_burst10min_pub --out=F.json [--quick] [--resume]

A device is core 0; all threads of its engines are pinned there. This process, which generates load, and the HTTP front are on
core 1. Variants alternate: serving_alone, naive (by turns), priority (one stock vLLM engine for both; --backend=vllm), idle_only,
ours, ours_commit (with a commit of 100M parameters every 10 s), sched_idle (rollouts in a second process under SCHED_IDLE) and
rollout_alone, at the number of streams that is fastest alone. JetStream compiles for some five minutes first; set
JAX_COMPILATION_CACHE_DIR and the next run does not. Objectives come from serving_alone of this run: 1.6x and 1.27x its
p99, TTFT at most 10x the unloaded median of the prompt-length quartile.

Rows (written as they finish): variant, backend, trace, repeat, affinity, busy_share_alone, ttft_p50_ms, ttft_p99_ms, tpot_p50_ms,
tpot_p99_ms, attainment, attainment_every_gap, rollout_tokens_per_s, harvest, and the latencies of every request. Harvest is rollout
tokens/s over [rollout_alone's tokens/s x idle share of serving alone].
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from common.config import Config
from common.progress import ProgressBar, progress_bar
from common.serving.coserving.events import Side
from common.traffic.openai_stream import Target
from common.traffic.replay import ReplayOptions, replay
from common.traffic.trace import Trace, TraceRequest, load_trace, packaged_traces
from scripts import entry
from scripts.coserving_engines import BACKENDS, SHAPES, tokenizer
from scripts.coserving_front import MODEL_NAME
from scripts.coserving_processes import CLIENT_CORE, CoServed, Process, idle_rollouts
from scripts.coserving_rows import BIN_S, Measured, Row, compare, complete, latencies, percentile, quartiles, table

_FLAGS = entry.flags_of(__name__)
VARIANTS = ("serving_alone", "naive", "priority", "idle_only", "ours", "sched_idle", "ours_commit")
FEW_REQUESTS = ("naive", "priority", "ours_commit")
"""Variants of which one repeat is enough: their difference is large, or no bound is stated."""
_BACKEND = flags.DEFINE_enum("backend", "jetstream", BACKENDS, "Engines of both models.", flag_values=_FLAGS)
_TRACE = flags.DEFINE_string(
    "trace", "azure2023_code_burst10min_pub", f"{', '.join(packaged_traces())}, or a CSV file of that form.", flag_values=_FLAGS
)
_VARIANTS = flags.DEFINE_list(
    "variants",
    [variant for variant in VARIANTS if variant != "ours_commit"],
    f"Which of {', '.join(VARIANTS)} to run; serving_alone always is, priority needs vllm.",
    flag_values=_FLAGS,
)
_WINDOW = flags.DEFINE_list("window", None, "START,END in seconds of the scaled trace.", flag_values=_FLAGS)
_TIME = flags.DEFINE_float("time", None, "Stretch arrivals by this; default: known for packaged traces.", flag_values=_FLAGS)
_PROMPTS = flags.DEFINE_float("prompts", None, "Scale the lengths of prompts by this; default likewise.", flag_values=_FLAGS)
_OUTPUTS = flags.DEFINE_float("outputs", None, "Scale the lengths of outputs by this; default likewise.", flag_values=_FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", None, "Default: as many as it takes to 1,000 requests.", flag_values=_FLAGS)
_QUICK = flags.DEFINE_bool(
    "quick", False, "A short window, once each: 4 to 6 minutes, JetStream's compilation apart.", flag_values=_FLAGS
)
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the rows that --out holds.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows": [...], "pooled": [...]} to.', flag_values=_FLAGS)
_TRACES_OUT = flags.DEFINE_string("decisions", None, "Folder for decision traces (Perfetto) of ours.", flag_values=_FLAGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scale:
    """How a trace is replayed: see Trace.scaled; `window_s` from its beginning on, after scaling, or from `quick_start_s` on."""

    time: float
    prompts: float
    outputs: float
    window_s: float
    quick_start_s: float = 0.0


SCALES = {
    "azure2023_code_burst10min_pub": Scale(time=1.0, prompts=0.05, outputs=0.3, window_s=100.0, quick_start_s=60.0),
    "azure2023_conv_pub": Scale(time=1.15, prompts=0.05, outputs=0.1, window_s=87.0),
}
"""Meant to keep serving alone busy 40-55 % of a core (48-50 % was seen on the code trace's short window). Prompts shrink more than
outputs: on this core a decode step costs as much as 40 prompt tokens, on an accelerator that serves an 8B model some hundreds."""
STRETCH = {"jetstream": 1.15}
"""Of arrivals and window, by backend: steps that compute padding too keep the core busier with the same requests."""
BUSY = (0.40, 0.55)
"""Between an idle device, on which everything works, and one that has nothing to lend."""
QUICK_WINDOW_S = 25.0
"""From where the load is about that of the whole window."""
WARM_UP_S = 15.0
"""Of the trace, replayed before anything is measured: memory is touched and buffers are made for the first time."""
NUM_REQUESTS = 1000
"""Pooled over repeats, for variants that are compared closely."""
STREAM_COUNTS = (16, 32, 64)
ALONE_S = {False: 12.0, True: 6.0}
UNLOADED_REPEATS = 5
SETTLE_S = 1.0
GRACE_S = 15.0
"""After the window, for what is unfinished; later counts as missed."""
NUM_EPISODES = 200
MEASURED = ("common/serving", "common/traffic", "rose_jax/jetstream", "rose_gpu/vllm", "scripts/bench_coserving.py")


def version_of_code() -> str:
    """A digest of what is measured, so that a resumed run never mixes versions."""
    digest = hashlib.sha256()
    for name in MEASURED:
        path = entry.ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    for file in sorted((entry.ROOT / "scripts").glob("coserving_*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def rollout_lengths() -> list[list[Any]]:
    """[prompt tokens, tokens of each turn, tokens between turns] of expert episodes of mixed-size FrozenLake, a third random."""
    from configs import frozenlake_mixed_cpu
    from scripts.bench_lengths import demonstrations

    config: Config = frozenlake_mixed_cpu.get_config()
    lengths: list[list[Any]] = []
    for trajectory in demonstrations(config, NUM_EPISODES, config.warmup.random_action_share):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], trajectory.loss_mask, [False]]).astype(int)))
        starts, ends = edges[::2], edges[1::2]
        between = int(np.median(starts[1:] - ends[:-1])) if len(starts) > 1 else 1
        lengths.append([int(starts[0]), [int(end - start) for start, end in zip(starts, ends, strict=True)], between])
    return lengths


def trace_of_flags() -> Trace:
    trace = load_trace(_TRACE.value)
    stretch = STRETCH.get(_BACKEND.value, 1.0) if trace.name in SCALES and _TIME.value is None else 1.0
    scale = SCALES.get(trace.name, Scale(time=1.0, prompts=1.0, outputs=1.0, window_s=trace.span_s))
    trace = trace.scaled(
        time=_TIME.value or stretch * scale.time,
        prompts=_PROMPTS.value or scale.prompts,
        outputs=_OUTPUTS.value or scale.outputs,
    )
    start_s = stretch * scale.quick_start_s if _QUICK.value else 0.0
    end_s = start_s + QUICK_WINDOW_S if _QUICK.value else stretch * scale.window_s
    if _WINDOW.value is not None:
        try:
            start_s, end_s = map(float, _WINDOW.value)
        except ValueError as error:
            raise ValueError(f"--window={','.join(_WINDOW.value)} must be START,END in seconds") from error
    trace = trace.window(start_s, min(end_s, trace.span_s))
    longest = SHAPES[Side.SERVING].max_context_tokens
    if trace.longest_context > longest:
        raise ValueError(f"{trace.description} has a request of {trace.longest_context} tokens, above {longest}; lower --prompts")
    return trace


class Bench:
    """One run of the benchmark against processes that are ready."""

    def __init__(
        self, served: CoServed, idle: Process | None, stock: CoServed | None, trace: Trace, report: Row, out: Path | None
    ) -> None:
        self.served, self.idle, self.stock, self.trace, self.report, self.out = served, idle, stock, trace, report, out
        self.rows: list[Row] = report["rows"]
        self.measured: Measured | None = None
        self.vocab_size = tokenizer().vocab_size

    def done(self, variant: str, repeat: int) -> bool:
        return any(row["variant"] == variant and row["repeat"] == repeat for row in self.rows)

    def alone(self) -> list[Row]:
        return [row for row in self.rows if row["variant"] == "serving_alone"]

    async def measure_unloaded(self) -> None:
        """Median TTFT of each prompt-length quartile on an idle server."""
        lengths = [request.prompt_tokens for request in self.trace.requests]
        classes = quartiles(lengths)
        if "unloaded_s" not in self.report:
            await self.served.device.ask("begin", variant="serving_alone", streams=0, bounds=list(classes.bounds))
            target = Target(url=self.served.url, model=MODEL_NAME)
            unloaded: dict[str, float] = {}
            for name in sorted({classes.class_of(length) for length in lengths}):
                typical = int(np.median([length for length in lengths if classes.class_of(length) == name]))
                one = TraceRequest(arrival_s=0.0, prompt_tokens=typical, output_tokens=2)
                probe = Trace(name="unloaded", requests=(one,), span_s=0.0)
                found: list[float | None] = []
                for seed in range(UNLOADED_REPEATS):
                    options = ReplayOptions(vocab_size=self.vocab_size, seed=1000 + seed, grace_s=GRACE_S)
                    found += [request.ttft_s for request in await replay(probe, target, options)]
                unloaded[name] = percentile(found, 50)
            await self.served.device.ask("end", start_s=0.0, end_s=1.0, bin_s=BIN_S)
            self.report["unloaded_s"] = unloaded
        self.measured = Measured(classes=classes, unloaded_s=self.report["unloaded_s"])

    async def find_streams(self, lengths: list[list[Any]]) -> None:
        """Rollouts alone, unbounded steps: the number of streams that is fastest."""
        for streams in STREAM_COUNTS:
            if any(row["variant"] == "rollout_alone" and row["streams"] == streams for row in self.rows):
                continue
            await self.served.device.ask("begin", variant="rollout_alone", streams=streams, lengths=lengths, seed=0, bounds=[])
            await asyncio.sleep(SETTLE_S)
            start_s = time.monotonic()
            await asyncio.sleep(ALONE_S[_QUICK.value])
            window = {"start_s": start_s, "end_s": time.monotonic(), "bin_s": BIN_S}
            found = await self.served.device.ask("end", **window)
            duration_s = window["end_s"] - start_s
            rate = found["rollout_tokens"] / duration_s
            self.add({"variant": "rollout_alone", "repeat": 0, "streams": streams, "requests": [], **found}, rate)

    def best_alone(self) -> tuple[int, float]:
        """Streams and tokens per second of the fastest rollout_alone."""
        rows = [row for row in self.rows if row["variant"] == "rollout_alone"]
        best = max(rows, key=lambda row: row["rollout_tokens_per_s"])
        return best["streams"], best["rollout_tokens_per_s"]

    async def warm_up(self, lengths: list[list[Any]]) -> None:
        """Every process once under the load that it will have; nothing is kept of it."""
        trace = self.trace.window(0.0, min(WARM_UP_S, self.trace.span_s))
        message: Row = {"lengths": lengths, "streams": max(STREAM_COUNTS), "seed": 0, "bounds": []}
        options = ReplayOptions(vocab_size=self.vocab_size, grace_s=GRACE_S)
        for served in filter(None, (self.served, self.stock)):
            await served.device.ask("begin", variant="naive", **message)
            await replay(trace, Target(url=served.url, model=MODEL_NAME), options)
            await served.device.ask("end", start_s=0.0, end_s=1.0, bin_s=BIN_S)
        if self.idle is not None:
            await self.idle.ask("begin", variant="rollout_alone", **message)
            await asyncio.sleep(ALONE_S[_QUICK.value])
            await self.idle.ask("end", start_s=0.0, end_s=1.0, bin_s=BIN_S)

    async def run(self, variant: str, repeat: int, lengths: list[list[Any]], bar: ProgressBar) -> None:
        assert self.measured is not None
        streams = 0 if variant == "serving_alone" else self.best_alone()[0]
        message: Row = {"lengths": lengths, "seed": repeat, "bounds": list(self.measured.classes.bounds)}
        if self.alone():
            objectives = self.measured.objectives(self.alone())
            message["objectives"] = {name: [objective.ttft_s, objective.tpot_s] for name, objective in objectives.items()}
        if _TRACES_OUT.value and variant.startswith("ours"):
            message["trace_file"] = str(Path(_TRACES_OUT.value).resolve() / f"{variant}.{repeat}.json")
        in_device = streams if variant != "sched_idle" else 0
        served = self.stock if variant == "priority" else self.served
        assert served is not None
        await served.device.ask("begin", variant=variant, streams=in_device, **message)
        if variant == "sched_idle":
            assert self.idle is not None
            await self.idle.ask("begin", variant="rollout_alone", streams=streams, **message)
        await asyncio.sleep(SETTLE_S)
        options = ReplayOptions(vocab_size=self.vocab_size, seed=repeat, grace_s=GRACE_S)
        start_s = time.monotonic() + 0.5
        target = Target(url=served.url, model=MODEL_NAME)
        requests = await replay(self.trace, target, options, on_done=bar.count, start_s=start_s)
        window = {"start_s": start_s, "end_s": start_s + self.trace.span_s, "bin_s": BIN_S}
        found = await served.device.ask("end", trace_file=message.get("trace_file"), **window)
        if variant == "sched_idle":
            assert self.idle is not None
            idle = await self.idle.ask("end", **window)
            found |= {name: idle[name] for name in ("rollout_share", "rollout_tokens", "rollout_tokens_by_bin")}
            found["idle_affinity"], found["idle_scheduler"] = idle["affinity"], idle["scheduler"]
        errors = sorted({request.error for request in requests if request.error is not None})
        sent = [request.sent_s - request.arrival_s for request in requests if request.sent_s is not None]
        row = {"variant": variant, "repeat": repeat, "streams": streams, "requests": latencies(requests), **found}
        row |= {"errors": errors[:3], "latest_send_ms": 1e3 * max(sent, default=0.0)}
        self.add(row, found["rollout_tokens"] / self.trace.span_s)

    def add(self, row: Row, rollout_tokens_per_s: float) -> None:
        """Keep a row, complete all with what is known by now, and write them."""
        row |= {"backend": _BACKEND.value, "trace": self.trace.description, "rollout_tokens_per_s": rollout_tokens_per_s}
        row["client_affinity"] = sorted(os.sched_getaffinity(0))
        self.rows.append(row)
        alone = self.alone()
        if alone and self.measured is not None:
            has_alone = any(other["variant"] == "rollout_alone" for other in self.rows)
            best = self.best_alone()[1] if has_alone else None
            self.rows[:] = [complete(other, self.measured, alone, best) for other in self.rows]
            self.report["pooled"] = compare(self.rows, self.measured, best)
        if self.out is not None:
            partial = self.out.with_suffix(".partial")
            partial.write_text(json.dumps(self.report) + "\n")
            partial.rename(self.out)


def open_report(out: Path | None, trace: Trace) -> Row:
    """A new report, or with --resume the one that --out holds, if it is of the same code and trace."""
    report: Row = {
        "code": version_of_code(),
        "backend": _BACKEND.value,
        "trace": trace.description,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=entry.ROOT, capture_output=True, text=True).stdout.strip(),
        "rows": [],
    }
    if not _RESUME.value or out is None or not out.exists():
        return report
    held = json.loads(out.read_text())
    for name in ("code", "backend", "trace"):
        if held[name] != report[name]:
            raise ValueError(
                f"--resume: {out} has rows of {name} {held[name]!r}, this is {report[name]!r}; start afresh without it"
            )
    return held


def plan(variants: list[str], num_requests: int) -> Iterator[tuple[str, int]]:
    """Which variant runs when: alternating, serving_alone first, since the others' objectives come from it."""
    repeats = _REPEATS.value or (1 if _QUICK.value else -(-NUM_REQUESTS // num_requests))
    for repeat in range(repeats):
        for variant in variants:
            if repeat == 0 or variant not in FEW_REQUESTS:
                yield variant, repeat


async def bench(trace: Trace, variants: list[str], lengths: list[list[Any]], report: Row, out: Path | None, folder: Path) -> Row:
    vocab_size = tokenizer().vocab_size
    todo = list(plan(variants, len(trace.requests)))
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(CoServed(_BACKEND.value, folder, vocab_size=vocab_size))
        idle = None
        if "sched_idle" in variants:
            idle = await stack.enter_async_context(idle_rollouts(_BACKEND.value, folder, vocab_size=vocab_size))
        stock = None
        if "priority" in variants:
            stock = await stack.enter_async_context(CoServed(_BACKEND.value, folder, vocab_size=vocab_size, side="stock"))
        run = Bench(served, idle, stock, trace, report, out)
        report["calibration"] = await served.device.ask("calibrate", timeout_s=300.0)
        await run.warm_up(lengths)
        await run.find_streams(lengths)
        await run.measure_unloaded()
        with progress_bar("requests", len(todo) * len(trace.requests), "request") as bar:
            for variant, repeat in todo:
                if not run.done(variant, repeat):
                    await run.run(variant, repeat, lengths, bar)
    return report


def write_models(folder: Path, vocab_size: int) -> None:
    """In a process of their own, which keeps JAX out of this one."""
    code = (
        "import sys; from pathlib import Path; from scripts.coserving_engines import write_model; "
        "write_model(Path(sys.argv[1]), vocab_size=int(sys.argv[2]), seed=int(sys.argv[3]))"
    )
    for seed, side in enumerate(Side):
        arguments = [sys.executable, "-c", code, str(folder / str(side)), str(vocab_size), str(seed)]
        subprocess.run(arguments, cwd=entry.ROOT, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def main() -> None:
    unknown = sorted(set(_VARIANTS.value) - set(VARIANTS))
    if unknown:
        raise ValueError(f"--variants: {', '.join(unknown)} is none of {', '.join(VARIANTS)}")
    if (os.cpu_count() or 1) < 2:
        raise ValueError("the benchmark needs two cores: one is the device, the other has clients and front")
    trace = trace_of_flags()
    variants = [variant for variant in VARIANTS if variant == "serving_alone" or variant in _VARIANTS.value]
    if _BACKEND.value != "vllm" and "priority" in variants:
        variants.remove("priority")  # it is vLLM's own scheduler
    out = Path(_OUT.value) if _OUT.value else None
    report = open_report(out, trace)
    if _TRACES_OUT.value:
        Path(_TRACES_OUT.value).mkdir(parents=True, exist_ok=True)
    os.sched_setaffinity(0, {CLIENT_CORE})
    with tempfile.TemporaryDirectory(prefix="rose_coserving_") as name:
        folder = Path(name)
        if _BACKEND.value == "vllm":
            write_models(folder, tokenizer().vocab_size)
        report = asyncio.run(bench(trace, variants, rollout_lengths(), report, out, folder))
    print(f"{_BACKEND.value}, {report['trace']}: {len(trace.requests)} requests a repeat")
    if report.get("pooled"):
        busy = report["rows"][-1]["busy_share_alone"]
        hint = (
            "" if BUSY[0] <= busy <= BUSY[1] else f", outside {BUSY[0]:.0%} to {BUSY[1]:.0%}: change --time, --prompts or --outputs"
        )
        print(f"serving alone is busy {busy:.0%}{hint}")
        print(table(report["pooled"]))


if __name__ == "__main__":
    entry.run(main, after_interrupt="Rows so far are in --out; the same command with --resume goes on.")
