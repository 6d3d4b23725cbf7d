"""Parts of bench_engine that are no throughput rows: an online request among rollouts, prefix reuse, invariant mode, a profile."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from common.serving.engine import StepLimits
from rose_jax.jetstream.compute import draw
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine_api import DriverConfig
from rose_jax.jetstream.step_inputs import ROW_PAGES
from rose_jax.models.qwen3 import Qwen3, abstract_model
from rose_jax.models.qwen3_config import Qwen3Config
from scripts.serving_clients import STEP_TOKENS, DriverClient, MissingLibraryError, OurLoop
from scripts.serving_workload import ClosedLoop, Prompt

SLOTS = 32
CONTEXT_TOKENS = 128
ROLLOUT = {"prompt": 32, "tokens": 90}
ONLINE = {"prompt": 48, "tokens": 4}
NUM_ONLINE = 40
ONLINE_INTERVAL_S = 0.1
SLOT_CAP = 28
"""Rollouts that the Driver gets at once, of its 32 slots: the only protection of online requests it offers."""


def _prompt(rng: np.random.Generator, vocab_size: int, shape: dict[str, int]) -> Prompt:
    return Prompt(stream_idx=0, token_ids=tuple(rng.integers(0, vocab_size, shape["prompt"]).tolist()), max_tokens=shape["tokens"])


def saturated_config(*, invariant: bool = False) -> JetStreamConfig:
    return JetStreamConfig(
        max_slots=SLOTS,
        max_context_tokens=CONTEXT_TOKENS,
        context_buckets=(CONTEXT_TOKENS,),
        row_buckets=(8, SLOTS),
        tile_buckets=(4, 32),
        invariant=invariant,
    )


def online_rows(model_config: Qwen3Config, params: nnx.State) -> list[dict]:
    """TTFT of online requests that arrive on a clock while rollouts never run out."""
    rows = [_row("ours: online preempts", SLOTS, _ours_online(model_config, params))]
    for cap in (SLOT_CAP, SLOTS):
        try:
            rows.append(_row("jetstream-driver behind a slot cap", cap, _driver_online(model_config, params, cap)))
        except MissingLibraryError as missing:
            print(f"rows left out: {missing}")
            break
    for row in rows:
        print(row, flush=True)
    return rows


def _row(engine: str, rollout_slots: int, measured: tuple[list[float], float]) -> dict:
    ttfts_ms, rollout_tokens_per_s = measured
    return {
        "engine": engine,
        "rollout_slots": rollout_slots,
        "requests": len(ttfts_ms),
        "ttft_ms_p50": round(statistics.median(ttfts_ms), 2),
        "ttft_ms_max": round(max(ttfts_ms), 2),
        "rollout_tokens_per_s": round(rollout_tokens_per_s, 1),
    }


def _ours_online(model_config: Qwen3Config, params: nnx.State) -> tuple[list[float], float]:
    client, rng = OurLoop(saturated_config(), model_config, params), np.random.default_rng(0)
    arrivals: dict[str, float] = {}
    ttfts_ms: list[float] = []
    num_rollouts = num_rollout_tokens = num_sent = 0
    started_s = time.perf_counter()
    while len(ttfts_ms) < NUM_ONLINE:
        while num_rollouts < SLOTS + 8:  # some wait: slots never stay empty
            client.send(_prompt(rng, model_config.vocab_size, ROLLOUT))
            num_rollouts += 1
        due_s = started_s + (num_sent + 1) * ONLINE_INTERVAL_S
        if num_sent < NUM_ONLINE and time.perf_counter() >= due_s:
            arrivals[client.send(_prompt(rng, model_config.vocab_size, ONLINE), priority=1)] = due_s
            num_sent += 1
        plan = client.engine.plan(StepLimits(max_tokens=STEP_TOKENS))
        assert plan is not None
        client.engine.submit(plan)
        result = client.engine.collect()
        now_s = time.perf_counter()
        for token in result.tokens:
            if token.request_id in arrivals:
                if arrivals[token.request_id]:
                    ttfts_ms.append(1e3 * (now_s - arrivals[token.request_id]))
                arrivals[token.request_id] = 0.0
            else:
                num_rollout_tokens += 1
        num_rollouts -= sum(completion.request_id not in arrivals for completion in result.completions)
    duration_s = time.perf_counter() - started_s
    client.engine.close()
    return ttfts_ms, num_rollout_tokens / duration_s


def _driver_online(model_config: Qwen3Config, params: nnx.State, cap: int) -> tuple[list[float], float]:
    rng = np.random.default_rng(0)
    client = DriverClient(DriverConfig(max_slots=SLOTS, max_context_tokens=CONTEXT_TOKENS), model_config, params)
    client.run(
        ClosedLoop(
            streams=SLOTS,
            turns=2,
            shared_tokens=0,
            new_tokens=48,
            max_tokens=8,
            vocab_size=model_config.vocab_size,
            grow=False,
            seed=0,
        )
    )
    ttfts_ms: list[float] = []
    num_rollout_tokens = num_sent = 0
    started_s = time.perf_counter()
    due_s = {}
    for _ in range(cap):
        client.send(_prompt(rng, model_config.vocab_size, ROLLOUT))
    while len(ttfts_ms) < NUM_ONLINE:
        next_s = started_s + (num_sent + 1) * ONLINE_INTERVAL_S
        if num_sent < NUM_ONLINE and time.perf_counter() >= next_s:
            num_sent += 1
            due_s[num_sent] = next_s
            client.send(dataclasses.replace(_prompt(rng, model_config.vocab_size, ONLINE), stream_idx=num_sent))
            continue
        channel = client.answer(timeout_s=max(0.0, next_s - time.perf_counter()) if num_sent < NUM_ONLINE else None)
        if channel is None:
            continue
        if channel.stream_idx:
            ttfts_ms.append(1e3 * (channel.timing.first_token_s - due_s[channel.stream_idx]))
        else:
            num_rollout_tokens += channel.timing.num_tokens
            client.send(_prompt(rng, model_config.vocab_size, ROLLOUT))
    duration_s = time.perf_counter() - started_s
    client.close()
    return ttfts_ms, num_rollout_tokens / duration_s


def reuse_rows(model_config: Qwen3Config, params: nnx.State) -> list[dict]:
    """Prefill tokens of 8 groups of 8 trajectories of 8 turns, as a training step has them, with and without prefix reuse."""
    rows = []
    for prefix_reuse in (False, True):
        config = dataclasses.replace(
            saturated_config(), max_context_tokens=256, context_buckets=(256,), prefix_reuse=prefix_reuse, pages_per_chunk=64 * 16
        )
        client = OurLoop(config, model_config, params)
        groups = [
            ClosedLoop(
                streams=8,
                turns=8,
                shared_tokens=40,
                new_tokens=12,
                max_tokens=4,
                vocab_size=model_config.vocab_size,
                grow=True,
                seed=seed,
            )
            for seed in range(8)
        ]
        started_s = time.perf_counter()
        prefill_tokens, sampled_tokens = _run_groups(client, groups)
        duration_s = time.perf_counter() - started_s
        row = {
            "prefix_reuse": prefix_reuse,
            "prefill_tokens": prefill_tokens,
            "sampled_tokens": sampled_tokens,
            "rollout_s": round(duration_s, 2),
        }
        rows.append(row)
        print(row, flush=True)
        client.engine.close()
    return rows


def _run_groups(client: OurLoop, groups: list[ClosedLoop]) -> tuple[int, int]:
    owner: dict[str, ClosedLoop] = {}
    streams: dict[str, int] = {}
    upcoming = [(group, prompt) for group in groups for prompt in group.start()]
    prefill_tokens = sampled_tokens = 0
    while True:
        for group, prompt in upcoming:
            request_id = client.send(prompt)
            owner[request_id], streams[request_id] = group, prompt.stream_idx
        upcoming = []
        plan = client.engine.plan(StepLimits(max_tokens=STEP_TOKENS))
        if plan is None:
            return prefill_tokens, sampled_tokens
        prefill_tokens += plan.prefill_tokens
        client.engine.submit(plan)
        result = client.engine.collect()
        sampled_tokens += len(result.tokens)
        for completion in result.completions:
            group = owner[completion.request_id]
            following = group.answered(streams[completion.request_id], list(completion.token_ids))
            if following is not None:
                upcoming.append((group, following))


def invariant_rows(model_config: Qwen3Config, params: nnx.State) -> list[dict]:
    """Tokens per second of invariant mode beside the fast mode, by number of streams."""
    clients = {invariant: OurLoop(saturated_config(invariant=invariant), model_config, params) for invariant in (False, True)}
    rows = []
    for streams in (1, 8, SLOTS):
        for invariant, client in clients.items():
            rates = []
            for seed in range(4):
                work = ClosedLoop(
                    streams=streams,
                    turns=1,
                    shared_tokens=0,
                    new_tokens=32,
                    max_tokens=32,
                    vocab_size=model_config.vocab_size,
                    grow=False,
                    seed=seed,
                )
                started_s = time.perf_counter()
                client.run(work)
                rates.append(streams * work.max_tokens / (time.perf_counter() - started_s))
            row = {"invariant": invariant, "streams": streams, "tokens_per_s": round(statistics.median(rates[1:]), 1)}
            rows.append(row)
            print(row, flush=True)
    return rows


def profile_rows(model_config: Qwen3Config, params: nnx.State, *, num_steps: int = 60) -> list[dict]:
    """Where the time of a decode step of 32 sequences goes: host work by part, and the device's share by leaving parts out."""
    client, rng = OurLoop(saturated_config(), model_config, params), np.random.default_rng(0)
    for _ in range(SLOTS):
        client.send(_prompt(rng, model_config.vocab_size, {"prompt": 32, "tokens": num_steps + 8}))
    names = ("host: plan and pack", "host: dispatch", "device: wait for the step", "host: results")
    parts_s: dict[str, list[float]] = {name: [] for name in names}
    for step_idx in range(num_steps + 4):
        times = [time.perf_counter()]
        plan = client.engine.plan(client.limits)
        times.append(time.perf_counter())
        assert plan is not None
        client.engine.submit(plan)
        times.append(time.perf_counter())
        result = client.engine.collect()
        times.append(time.perf_counter())
        if step_idx >= 4:  # the first steps prefill
            plan_s, submit_s, collect_s = np.diff(times)
            wait_s = min(max(0.0, result.device_s - submit_s), collect_s)
            for name, duration_s in zip(names, (plan_s, submit_s, wait_s, collect_s - wait_s), strict=True):
                parts_s[name].append(duration_s)
    rows = [
        *({"part": name, "us": statistics.median(durations)} for name, durations in parts_s.items()),
        *_device_rows(model_config, params),
    ]
    rows = [{"part": row["part"], "us": round(1e6 * row["us"])} for row in rows]
    for row in rows:
        print(row, flush=True)
    client.engine.close()
    return rows


def _device_rows(model_config: Qwen3Config, params: nnx.State) -> list[dict]:
    graph, _ = nnx.split(abstract_model(model_config))
    token_ids = jnp.zeros((1, SLOTS), jnp.int32)

    def layers(params: nnx.State, token_ids: jax.Array) -> jax.Array:
        model: Qwen3 = nnx.merge(graph, params)
        return model(token_ids, token_ids, lambda _layer_idx, q, _k, _v: q)

    def head(params: nnx.State, hidden: jax.Array) -> jax.Array:
        return nnx.merge(graph, params).logits(hidden)

    def sample(logits: jax.Array, rows: jax.Array) -> jax.Array:
        return draw(logits, rows, max_top=0, with_options=False).token_ids

    rows = jnp.zeros((SLOTS, ROW_PAGES), jnp.int32)
    logits = jnp.zeros((SLOTS, model_config.vocab_size))
    hidden = jnp.zeros((SLOTS, model_config.hidden_size))
    return [
        {"part": "device alone: an empty program", "us": _median_s(jax.jit(lambda rows: rows), rows)},
        {"part": "device alone: all layers without attention", "us": _median_s(jax.jit(layers), params, token_ids)},
        {"part": "device alone: output head", "us": _median_s(jax.jit(head), params, hidden)},
        {"part": "device alone: sampling", "us": _median_s(jax.jit(sample), logits, rows)},
    ]


def _median_s(function: Callable, *arguments: object, repeats: int = 50) -> float:
    jax.block_until_ready(function(*arguments))
    durations = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        durations.append(time.perf_counter() - started_s)
    return statistics.median(durations)
