"""What a new weight version costs the streams of a running vLLM engine: ours beside vLLM's own ways, on one engine, in turn.

A stream's gap is the time between two of its tokens. Ours comes through the transfer layer: staged beside the live weights in a
thread while streams go on (`stage_gap`), then committed between two steps (`gap`), in one go or with a step of a second engine
after each slice (`other_gap` is the longest gap there). vLLM's: reload_weights from a folder or from memory, and its checkpoint
patches; what they need (files, arrays, changes in memory) is there before the clock starts; afterwards the engine is taken back.
After the first and the last update of each way all weights are compared bit for bit with the new version, in the end also with a
fresh load; in between, ours finds out a base that is not the right one.

    python -m scripts.bench_update --out=update.json [--quick] [--sizes=0.6M,100M] [--updates=20]

Rows: size, changed (share of elements), way, updates; median and p99 over updates, in ms, of worker (time in the worker), gap,
stage_gap, other_gap; plain (median and p99 gap without any update). Weights are published in bfloat16 and computed in float32.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from common.serving.engine import StepLimits
from common.transfer.bits import flat_bits
from common.transfer.publisher import Publisher
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.types import Request, SamplingKey, SamplingParams
from rose_gpu.vllm.direct_update import sparse_update
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.target import VllmWeightTarget
from rose_jax.hf_folder import write_folder
from rose_jax.models.qwen3_config import Qwen3Config
from scripts import entry
from scripts.transfer_data import Weights, model_weights, qwen3_shapes, step_model

_FLAGS = entry.flags_of(__name__)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows": [...]} to.', flag_values=_FLAGS)
_QUICK = flags.DEFINE_bool("quick", False, "The small model and three updates.", flag_values=_FLAGS)
_UPDATES = flags.DEFINE_integer("updates", 20, "Updates of each way and density.", lower_bound=2, flag_values=_FLAGS)

CHANGED = (0.01, 0.1)
NUM_STREAMS, PROMPT_TOKENS, CONTEXT_TOKENS = 8, 16, 512
PLAIN_STEPS = 10
"""Steps without an update before each; of the same streams, so that both see the same noise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    num_layers: int
    vocab_size: int
    hidden: int
    intermediate: int
    head_dim: int

    def model(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden,
            num_layers=self.num_layers,
            num_heads=2 * self.hidden // self.head_dim,
            num_kv_heads=self.hidden // self.head_dim,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT_TOKENS,
        )

    def weights(self) -> Weights:
        shapes = qwen3_shapes(self.num_layers, self.vocab_size, self.hidden, self.intermediate)
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        weights = model_weights(shapes)
        for array in weights.values():
            array[array == 0] = 0.02  # one code below zero is no number
        return weights


SIZES = {
    "0.6M": Size(num_layers=2, vocab_size=1_000, hidden=128, intermediate=384, head_dim=32),
    "100M": Size(num_layers=6, vocab_size=20_000, hidden=1_024, intermediate=3_072, head_dim=128),
}
_SIZES = flags.DEFINE_multi_enum("sizes", list(SIZES), list(SIZES), "Model sizes.", flag_values=_FLAGS)


class Streams:
    """An engine kept full of streams that decode; `gaps` are the seconds between the tokens of one and the same stream."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.gaps: list[float] = []
        self._last_s: dict[str, float] = {}
        self._num_added = 0

    def step(self) -> None:
        while len(self._last_s) < NUM_STREAMS:
            self._add()
        plan = self.engine.plan(StepLimits(max_tokens=self.engine.options.max_step_tokens))
        assert plan is not None
        self.engine.submit(plan)
        result = self.engine.collect()
        now_s = time.perf_counter()
        for token in result.tokens:
            if self._last_s[token.request_id]:  # not its first
                self.gaps.append(now_s - self._last_s[token.request_id])
            self._last_s[token.request_id] = now_s
        for completion in result.completions:
            assert completion.error is None, completion.error
            del self._last_s[completion.request_id]

    def longest(self, act: Callable[[], object]) -> float:
        """The longest gap of the steps that `act` takes and of one more."""
        first = len(self.gaps)
        act()
        self.step()
        return max(self.gaps[first:])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def _add(self) -> None:
        rng = np.random.default_rng(self._num_added)
        prompt = tuple(rng.integers(0, self.engine.info.vocab_size, PROMPT_TOKENS).tolist())
        request_id = str(self._num_added)
        self._num_added += 1
        max_tokens = CONTEXT_TOKENS - PROMPT_TOKENS - 32 * len(self._last_s)  # so that they end at different steps
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.0)
        key = SamplingKey(run_seed=0, trajectory_id=self._num_added, turn_idx=0)
        self.engine.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, key=key))
        self._last_s[request_id] = 0.0


Measured = dict[str, float]
"""Seconds by name, of one update."""


class Bench:
    """One size: the updated engine, another beside it, and the transfer layer between learner and engine."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.folder, self.size, self.compares = folder, size, True
        self.live = size.weights()
        store = MemoryStore()
        self.publisher, self.version = Publisher(store), -1
        self.own, self.other = (Streams(self.engine(self.live, name)) for name in ("own", "other"))
        self.target = VllmWeightTarget(self.own.engine)
        self.subscriber = Subscriber(store, self.target, receiver_id="bench")
        self.staging = ThreadPoolExecutor(1)
        self.publish(self.live)
        assert self.subscriber.adopt() == self.version, "the engine did not load what was published"

    def engine(self, weights: Weights, name: str) -> VllmEngine:
        options = VllmOptions(
            model_dir=str(self.write(weights, name)),
            max_slots=NUM_STREAMS,
            max_context_tokens=CONTEXT_TOKENS,
            max_step_tokens=512,
            published_dtype="bfloat16",
        )
        return VllmEngine(options)

    def write(self, weights: Weights, name: str) -> Path:
        fields = self.size.model().to_hf() | {"dtype": "float32", "torch_dtype": "float32"}
        write_folder(self.folder / name, config_fields=fields, shards=iter([weights]), write_extra=None, overwrite=True)
        return self.folder / name

    def publish(self, weights: Weights) -> None:
        self.version += 1
        self.publisher.publish(self.version, weights).result()

    def check(self, expected: Mapping[str, np.ndarray], way: str) -> None:
        if not self.compares:
            return
        wrong = [name for name, tensor in expected.items() if self.target.published(name).tobytes() != tensor.tobytes()]
        assert not wrong, f"after {way}, {wrong} are not the new version's"

    def plain(self) -> list[float]:
        first = len(self.own.gaps)
        self.own.steps(PLAIN_STEPS)
        return self.own.gaps[first:]

    def baseline(self, way: str, new: Weights) -> Measured:
        """Bring the engine to `new` in vLLM's way, then back."""
        act = BASELINES[way](self, new)
        measured = self.timed(act)
        self.check(new, way)
        back = sparse_update(new, self.live, base_version=0, version=self.own.engine.load().weight_version)
        self.own.engine.commit(back, version=back.version)
        return measured

    def ours(self, new: Weights, *, in_slices: bool) -> Measured:
        """Publish `new`, stage it while streams go on, commit it."""
        self.publish(new)
        self.own.steps(2)
        future = self.staging.submit(self.subscriber.stage)

        def until_staged() -> None:
            while not future.done():
                self.own.step()

        stage_gap_s = self.own.longest(until_staged)
        staged = future.result()
        assert staged is not None
        if in_slices:
            measured = self.timed_in_slices(self.subscriber.commit_in_slices(staged))
        else:
            measured = self.timed(lambda: self.subscriber.commit(staged))
        self.live = new
        self.check(new, "ours")
        return measured | {"stage_gap": stage_gap_s}

    def timed(self, act: Callable[[], object]) -> Measured:
        spent_s = 0.0

        def timed_act() -> None:
            nonlocal spent_s
            started_s = time.perf_counter()
            act()
            spent_s = time.perf_counter() - started_s

        self.own.step()
        gap_s = self.own.longest(timed_act)
        return {"worker": spent_s, "gap": gap_s}

    def timed_in_slices(self, slices: Iterator[None]) -> Measured:
        """The other engine steps between any two slices; its time is not the worker's, but part of our own streams' gap."""
        self.other.steps(2)
        self.own.step()
        spent_s, num_slices = 0.0, 0
        first_gap = len(self.other.gaps)

        def act() -> None:
            nonlocal spent_s, num_slices
            while True:
                started_s = time.perf_counter()
                ended = next(slices, slices) is slices
                spent_s += time.perf_counter() - started_s
                num_slices += 1
                self.other.step()
                if ended:
                    return

        gap_s = self.own.longest(act)
        return {"worker": spent_s, "gap": gap_s, "other_gap": max(self.other.gaps[first_gap:]), "slices": num_slices}

    def check_fresh_load(self) -> None:
        fresh = self.engine(self.live, "fresh")
        try:
            mine, theirs = (dict(engine.call_workers(_parameters)[0]) for engine in (self.own.engine, fresh))
            assert mine == theirs, "the updated engine is not what a fresh load of its version is"
        finally:
            fresh.close()

    def close(self) -> None:
        self.staging.shutdown()
        self.subscriber.close()
        self.publisher.close()
        for streams in (self.own, self.other):
            streams.engine.close()


def _parameters(worker: Any) -> list[tuple[str, bytes]]:
    return [(name, param.detach().numpy().tobytes()) for name, param in worker.model_runner.get_model().named_parameters()]


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _reload_folder(bench: Bench, new: Weights) -> Callable[[], object]:
    path = str(bench.write(new, "new"))
    return lambda: bench.own.engine.call_workers("reload_weights", weights_path=path)


def _reload_memory(bench: Bench, new: Weights) -> Callable[[], object]:
    tensors = [(name, _tensor(array)) for name, array in new.items()]
    return lambda: bench.own.engine.call_workers("reload_weights", weights_iterator=iter(tensors))


def _patches(bench: Bench, new: Weights) -> Callable[[], object]:
    import torch
    from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch, load_checkpoint_weight_patches

    patches = []
    for name, array in new.items():
        changed = np.flatnonzero(flat_bits(bench.live[name]) != flat_bits(array))
        if len(changed):
            values = _tensor(array.reshape(-1)[changed])
            patches.append(CheckpointWeightPatch(name, array.shape, torch.bfloat16, values, torch.from_numpy(changed)))

    def apply(worker: Any) -> None:
        load_checkpoint_weight_patches(worker.model_runner.get_model(), patches)

    return lambda: bench.own.engine.call_workers(apply)


BASELINES: dict[str, Callable[[Bench, Weights], Callable[[], object]]] = {
    "reload_weights, folder": _reload_folder,
    "reload_weights, memory": _reload_memory,
    "checkpoint patches": _patches,
}


def rows_of(size_name: str, num_updates: int) -> list[dict[str, object]]:
    found: dict[tuple[float, str], list[Measured]] = {}
    plain: list[float] = []
    with tempfile.TemporaryDirectory(prefix="rose_bench_update_") as folder:
        bench = Bench(SIZES[size_name], Path(folder))
        try:
            for round_idx in range(num_updates + 1):  # the first one warms up
                bench.compares = round_idx in (0, num_updates)
                for changed in CHANGED:
                    measured: dict[str, Measured] = {}
                    new, newer = (step_model(bench.live, changed, seed=2 * round_idx + idx) for idx in range(2))
                    plain = [*plain, *bench.plain()] if round_idx else bench.plain()
                    for way in BASELINES:
                        measured[way] = bench.baseline(way, new)
                        bench.own.steps(2)
                    measured["ours"] = bench.ours(new, in_slices=False)
                    measured["ours, in slices"] = bench.ours(newer, in_slices=True)
                    if round_idx:
                        for way, value in measured.items():
                            found.setdefault((changed, way), []).append(value)
            bench.check_fresh_load()
        finally:
            bench.close()
    typical = {"plain_ms": 1e3 * float(np.median(plain)), "plain_p99_ms": 1e3 * float(np.percentile(plain, 99))}
    num_elements = sum(array.size for array in SIZES[size_name].weights().values())
    return [
        {"size": size_name, "parameters": num_elements, "changed": changed, "way": way, "updates": len(values)}
        | _summary(values)
        | typical
        for (changed, way), values in sorted(found.items())
    ]


def _summary(values: list[Measured]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name in values[0]:
        series = np.array([value[name] for value in values])
        if name == "slices":
            row["slices"] = float(np.median(series))
        else:
            row[f"{name}_ms"] = 1e3 * float(np.median(series))
            row[f"{name}_p99_ms"] = 1e3 * float(np.percentile(series, 99))
    return row


def table(rows: list[dict[str, object]]) -> str:
    """Milliseconds as median / p99 over updates."""
    columns = ("worker", "gap", "stage_gap", "other_gap", "plain")
    lines = [f"{'size':>5} {'changed':>7}  {'way':<24}" + "".join(f"{name + ' ms':>18}" for name in columns)]
    for row in rows:
        cells = [f"{row[f'{c}_ms']:.1f} / {row[f'{c}_p99_ms']:.1f}" if f"{c}_ms" in row else "-" for c in columns]
        lines.append(f"{row['size']:>5} {row['changed']:>7.0%}  {row['way']:<24}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    sizes = ["0.6M"] if _QUICK.value else _SIZES.value
    rows: list[dict[str, object]] = []
    for size_name in sizes:
        rows += rows_of(size_name, 3 if _QUICK.value else _UPDATES.value)
        if _OUT.value:
            Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    entry.run(main)
