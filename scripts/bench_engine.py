"""How fast the JetStream engine serves: our step loop, the stock Driver over the same model code, and vLLM on CPU, alternated.

Rows (engine, workload, streams, slots, prompt_tokens, tokens_per_s, ttft_ms): medians over repeats of a closed loop of 1, 8 and 32
streams, single requests and multi-turn ones that share a prefix; the Driver at the slot count that serves it best. Then an online
request into a rollout-saturated engine (TTFT, ours against the Driver behind a slot cap), prefill tokens with and without prefix
reuse, the price of invariant mode, and where a step's time goes. Rows of a library that is not installed are left out, aloud.

    python -m scripts.bench_engine --out=engine.json [--model=tiny|small] [--repeats=5] [--parts=rows,online,...]
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from absl import app, flags
from flax import nnx
from tqdm import tqdm

from common import check_installation
from rose_jax.export import save_checkpoint
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine_api import DriverConfig
from rose_jax.models.qwen3 import create_model
from rose_jax.models.qwen3_config import Qwen3Config
from scripts import entry
from scripts.bench_engine_parts import invariant_rows, online_rows, profile_rows, reuse_rows
from scripts.serving_clients import Client, DriverClient, MissingLibraryError, OurLoop, VllmClient
from scripts.serving_workload import ClosedLoop, Timing

_FLAGS = entry.flags_of(__name__)
_OUT = flags.DEFINE_string("out", None, "JSON file for all rows.", required=True, flag_values=_FLAGS)
_MODEL = flags.DEFINE_enum("model", "tiny", ["tiny", "small"], "0.15M or 5M parameters.", flag_values=_FLAGS)
_REPEATS = flags.DEFINE_integer("repeats", 5, "Alternated repeats of each row.", lower_bound=1, flag_values=_FLAGS)
_STREAMS = flags.DEFINE_list("streams", ["1", "8", "32"], "Numbers of concurrent streams.", flag_values=_FLAGS)
_PARTS = flags.DEFINE_list("parts", ["rows", "online", "reuse", "invariant", "profile"], "What to run.", flag_values=_FLAGS)

VOCAB_SIZE = 128
RUN_AHEAD_TOKENS = 8
"""Tokens of a sequence in one step in the second row of ours: for engines that serve rollouts alone."""
MODELS = {
    "tiny": {"hidden_size": 64, "num_layers": 3, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 192},
    "small": {"hidden_size": 256, "num_layers": 6, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "intermediate_size": 768},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """See ClosedLoop. `context_tokens` is what every engine is built for."""

    name: str
    turns: int
    shared_tokens: int
    new_tokens: int
    max_tokens: int
    grow: bool
    context_tokens: int

    def streams(self, num_streams: int, seed: int) -> ClosedLoop:
        return ClosedLoop(
            streams=num_streams,
            turns=self.turns,
            shared_tokens=self.shared_tokens,
            new_tokens=self.new_tokens,
            max_tokens=self.max_tokens,
            vocab_size=VOCAB_SIZE,
            grow=self.grow,
            seed=seed,
        )


WORKLOADS = (
    Workload(name="single", turns=4, shared_tokens=0, new_tokens=32, max_tokens=64, grow=False, context_tokens=128),
    Workload(name="multi_turn", turns=8, shared_tokens=64, new_tokens=12, max_tokens=8, grow=True, context_tokens=256),
)


def make_model(name: str) -> tuple[Qwen3Config, nnx.State]:
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        tie_word_embeddings=True,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=1,
        **MODELS[name],
    )
    return config, nnx.state(create_model(config, seed=0, embedding_init_std=0.125))


def our_config(slots: int, context_tokens: int) -> JetStreamConfig:
    """One context bucket, as the Driver has, and programs for steps of few and of all rows."""
    return JetStreamConfig(
        max_slots=slots,
        max_context_tokens=context_tokens,
        context_buckets=(context_tokens,),
        row_buckets=tuple(sorted({-(-slots // 4), slots})),
        tile_buckets=(2, 8, 32),
    )


def build(model_config: Qwen3Config, params: nnx.State, folder: Path, workload: Workload, streams: int) -> list[list[Client]]:
    """Engines that compete for one row; those of one inner list only by their best."""
    context = workload.context_tokens
    clients: list[list[Client]] = [
        [OurLoop(our_config(streams, context), model_config, params, tokens_per_sequence=tokens_per_sequence)]
        for tokens_per_sequence in (1, RUN_AHEAD_TOKENS)
    ]
    slot_counts = sorted({streams, max(2, streams // 2), 2 * streams})

    def driver(slots: int) -> Client:
        return DriverClient(DriverConfig(max_slots=slots, max_context_tokens=context), model_config, params)

    makers: list[list[Callable[[], Client]]] = [
        [functools.partial(driver, slots) for slots in slot_counts],
        [lambda: VllmClient(folder, slots=streams, max_context_tokens=context)],
    ]
    for group in makers:
        try:
            clients.append([make() for make in group])
        except MissingLibraryError as missing:
            print(f"rows left out: {missing}")
    return clients


def measure(client: Client, work: ClosedLoop) -> tuple[float, float]:
    """Tokens per second and the median TTFT in ms."""
    started_s = time.perf_counter()
    timings: list[Timing] = client.run(work)
    duration_s = time.perf_counter() - started_s
    num_tokens = sum(timing.num_tokens for timing in timings)
    expected = work.streams * work.turns * work.max_tokens
    assert num_tokens == expected, f"{client.name} generated {num_tokens} tokens, asked for {expected}"
    return num_tokens / duration_s, 1e3 * statistics.median(timing.first_token_s - timing.sent_s for timing in timings)


def throughput_rows(model_config: Qwen3Config, params: nnx.State, folder: Path) -> list[dict]:
    rows = []
    for workload in WORKLOADS:
        for streams in map(int, _STREAMS.value):
            groups = build(model_config, params, folder, workload, streams)
            results: dict[int, list[tuple[float, float]]] = {}
            everyone = [client for group in groups for client in group]
            for repeat in tqdm(range(-1, _REPEATS.value), desc=f"{workload.name}, {streams} streams"):
                for client in everyone:
                    result = measure(client, workload.streams(streams, seed=repeat + 1))
                    if repeat >= 0:  # the first round warms up
                        results.setdefault(id(client), []).append(result)
            for group in groups:
                medians = {
                    id(client): [statistics.median(values) for values in zip(*results[id(client)], strict=True)] for client in group
                }
                best = max(group, key=lambda client: medians[id(client)][0])
                row = {
                    "engine": best.name,
                    "workload": workload.name,
                    "streams": streams,
                    "slots": best.slots,
                    "prompt_tokens": workload.shared_tokens + workload.new_tokens,
                    "tokens_per_s": round(medians[id(best)][0], 1),
                    "ttft_ms": round(medians[id(best)][1], 2),
                    "tokens_per_s_of_repeats": [round(tokens_per_s, 1) for tokens_per_s, _ in results[id(best)]],
                }
                rows.append(row)
                print({name: value for name, value in row.items() if name != "tokens_per_s_of_repeats"}, flush=True)
            for client in everyone:
                client.close()
    return rows


def main(_: Sequence[str]) -> None:
    check_installation(__file__)
    model_config, params = make_model(_MODEL.value)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    report: dict[str, object] = {"model": _MODEL.value, "num_parameters": num_parameters, "repeats": _REPEATS.value}
    parts: dict[str, Callable[[], list[dict]]] = {
        "online": lambda: online_rows(model_config, params),
        "reuse": lambda: reuse_rows(model_config, params),
        "invariant": lambda: invariant_rows(model_config, params),
        "profile": lambda: profile_rows(model_config, params),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        save_checkpoint(folder, params, model_config, dtype="float32")
        parts = {"rows": lambda: throughput_rows(model_config, params, folder), **parts}
        for part in _PARTS.value:
            if part not in parts:
                raise app.UsageError(f"--parts: {part!r} is none of {', '.join(parts)}")
            report[part] = parts[part]()
            Path(_OUT.value).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    app.run(main)
