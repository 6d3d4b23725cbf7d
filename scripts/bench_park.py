"""Parking a rollout model and activating it again: seconds, bytes, the longest piece, and what memory the process then holds.

    python -m scripts.bench_park --backend=jetstream [--sizes=0.6M,100M] [--times=10] --out=park.json

A parked engine's weights are in a file and its cache is gone (common/serving/parking.py). An online request waits for one piece at
most. `first step` is the first rollout step afterwards, which touches the cache's memory anew, beside the one before parking.
Memory is the process's anonymous memory as the kernel counts it, in MB; what the file has is no part of it.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from absl import flags

from common.serving.engine import StepLimits
from common.types import Request, SamplingKey, SamplingParams
from scripts import entry

_FLAGS = entry.flags_of(__name__)
SIZES = {
    "0.6M": {"num_layers": 2, "vocab_size": 1_000, "hidden_size": 128, "intermediate_size": 384, "num_heads": 8, "head_dim": 32},
    "100M": {
        "num_layers": 6,
        "vocab_size": 20_000,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_heads": 16,
        "head_dim": 128,
    },
}
_BACKEND = flags.DEFINE_enum("backend", "jetstream", ["jetstream", "vllm"], "Engine.", flag_values=_FLAGS)
_SIZES = flags.DEFINE_multi_enum("sizes", list(SIZES), list(SIZES), "Model sizes.", flag_values=_FLAGS)
_TIMES = flags.DEFINE_integer("times", 10, "Parkings and activations of each.", lower_bound=1, flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write.", flag_values=_FLAGS)

MAX_SLOTS, CONTEXT_TOKENS, PROMPT_TOKENS = 8, 512, 64

Row = dict[str, Any]


def build(size: str, folder: Path) -> tuple[Any, int]:
    """An engine with random weights, and the bytes of those."""
    import jax
    from flax import nnx

    from rose_jax.models.qwen3 import create_model
    from rose_jax.models.qwen3_config import Qwen3Config

    shape = SIZES[size]
    model_config = Qwen3Config(
        **shape, num_kv_heads=shape["num_heads"] // 2, tie_word_embeddings=True, max_position_embeddings=CONTEXT_TOKENS
    )
    params = nnx.state(create_model(model_config, seed=0))
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if _BACKEND.value == "jetstream":
        from rose_jax.jetstream.config import JetStreamConfig
        from rose_jax.jetstream.engine import JetStreamEngine

        config = JetStreamConfig(
            max_slots=MAX_SLOTS,
            max_context_tokens=CONTEXT_TOKENS,
            max_prefill_tiles=MAX_SLOTS * PROMPT_TOKENS // 16,
            row_buckets=(MAX_SLOTS,),
            tile_buckets=(MAX_SLOTS * PROMPT_TOKENS // 16,),
            context_buckets=(CONTEXT_TOKENS,),
        )
        return JetStreamEngine(config, model_config, params, version=0, name="parked"), num_bytes

    from rose_gpu.vllm.engine import VllmEngine
    from rose_gpu.vllm.options import VllmOptions
    from rose_jax.export import save_checkpoint

    save_checkpoint(folder / "model", params, model_config, dtype="float32")
    del params
    return VllmEngine(
        VllmOptions(model_dir=str(folder / "model"), max_slots=MAX_SLOTS, max_context_tokens=CONTEXT_TOKENS)
    ), num_bytes


def anonymous_mb() -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3


def first_step_s(engine: Any, number: int) -> float:
    """Seconds of the step that computes a batch of new prompts; then they are aborted."""
    ids = [f"{number}.{idx}" for idx in range(MAX_SLOTS)]
    for idx, request_id in enumerate(ids):
        prompt = tuple(2 + (number * 131 + idx * 17 + position * 7) % 900 for position in range(PROMPT_TOKENS))
        key = SamplingKey(run_seed=number, trajectory_id=idx, turn_idx=0)
        engine.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=8), key=key))
    started_s = time.perf_counter()
    engine.submit(engine.plan(StepLimits(max_tokens=MAX_SLOTS * PROMPT_TOKENS)))
    engine.collect()
    duration_s = time.perf_counter() - started_s
    for request_id in ids:
        engine.abort(request_id)
    engine.drain()
    return duration_s


def pieces_s(work: Callable[[], Iterator[object]]) -> list[float]:
    """Seconds of each piece."""
    found, pieces = [], work()
    while True:
        started_s = time.perf_counter()
        ended = next(pieces, StopIteration) is StopIteration
        found.append(time.perf_counter() - started_s)
        if ended:
            return found


def measure(size: str) -> Row:
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="rose_park_") as folder:
        engine, num_bytes = build(size, Path(folder))
        try:
            for number in range(_TIMES.value + 1):
                values = {"step_before_ms": 1e3 * first_step_s(engine, 2 * number), "memory_mb": anonymous_mb()}
                for name, work in (("park", engine.park), ("activate", engine.activate)):
                    seconds = pieces_s(work)
                    values |= {f"{name}_ms": 1e3 * sum(seconds), f"{name}_longest_piece_ms": 1e3 * max(seconds)}
                    values[f"{name}_pieces"] = len(seconds)
                    values |= {"memory_parked_mb": anonymous_mb()} if name == "park" else {"memory_active_mb": anonymous_mb()}
                values["first_step_ms"] = 1e3 * first_step_s(engine, 2 * number + 1)
                if number:  # the first one warms up
                    for name, value in values.items():
                        found.setdefault(name, []).append(value)
        finally:
            engine.close()
    row = {name: (max if name.endswith("longest_piece_ms") else statistics.median)(values) for name, values in found.items()}
    return {"backend": _BACKEND.value, "size": size, "weights_mb": num_bytes / 1e6, "times": _TIMES.value} | row


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = [measure(size) for size in _SIZES.value]
    for row in rows:
        print(
            f"{row['backend']} {row['size']} ({row['weights_mb']:.0f} MB of weights), medians of {row['times']}: "
            f"parked in {row['park_ms']:.1f} ms ({row['park_pieces']:.0f} pieces, longest {row['park_longest_piece_ms']:.1f}), "
            f"activated in {row['activate_ms']:.1f} ms (longest {row['activate_longest_piece_ms']:.1f}); "
            f"memory {row['memory_mb']:.0f} -> {row['memory_parked_mb']:.0f} -> {row['memory_active_mb']:.0f} MB; "
            f"a step before {row['step_before_ms']:.1f}, the first one after {row['first_step_ms']:.1f} ms"
        )
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    entry.run(main)
