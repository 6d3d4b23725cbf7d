"""Which engines the conformance suite runs over. Adding a backend means adding one function here (see README.md).

The function builds an EngineCase; it runs only when a test wants that engine, so it imports its backend inside and may skip
itself with a reason where the backend is not installed. What an engine does not do is declared in `lacks`, with the reason that
the skipped test then shows; it is never guessed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from common.serving.engine import StaleCache, StepEngine

MAX_SLOTS = 4
MAX_CONTEXT_TOKENS = 64
MIN_VOCAB_SIZE = 32
"""The size every engine is built in: small, and the same for all tests, so that a compiled program serves them all."""


class Feature(enum.StrEnum):
    """What an engine may lack. Everything else is required."""

    CHUNKED_PREFILL = "a prompt longer than the step's limit is computed in chunks"
    PREFILL_WITH_DECODE = "one step holds prefill and decode"
    PRIORITY_PREEMPTION = "a waiting request of higher priority takes a slot at the next step"
    KEEP_CACHE = "preempt(keep_cache=True) computes nothing again"
    RESUME_FIRST = "a preempted request resumes before its equals"
    TRUNCATED_SAMPLING = "top-k, top-p and min-p"
    TOP_LOGPROBS = "log-probabilities of the n most probable tokens"
    STOP_STRINGS = "stop strings"
    PREFIX_REUSE = "a prompt that begins like an ended request is not computed again"
    REQUEST_CHECKS = "sampling options out of range are rejected"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineCase:
    """One engine under test.

    Args:
        make: a fresh engine of MAX_SLOTS and MAX_CONTEXT_TOKENS, vocabulary of MIN_VOCAB_SIZE or more, weights(0) as version 0.
        weights: weights from a seed, in the form that `commit` takes; other seeds give other distributions.
        wrong_weights: what `commit` must refuse (ValueError or a RoseError): name of the fault -> weights.
        logprob_atol: how far a log-probability may move with batch mates, slot and preemption. Tokens must not move at all.
        lacks: features that the engine does not have, each with the reason.
        token_text: what a token reads as; needed for Feature.STOP_STRINGS.
        stale_cache: what a commit does to cached state of older weights.
        reuse: keep one engine for all tests that leave it whole, where building one is dear.
        num_random_schedules: hypothesis examples per property.
    """

    make: Callable[[], StepEngine[Any]]
    weights: Callable[[int], object]
    wrong_weights: Callable[[], Mapping[str, object]]
    logprob_atol: float
    lacks: Mapping[Feature, str] = dataclasses.field(default_factory=dict)
    token_text: Callable[[int], str] | None = None
    stale_cache: StaleCache = StaleCache.KEEP
    reuse: bool = False
    num_random_schedules: int = 150

    def needs(self, *features: Feature) -> None:
        """Skip the running test, with the declared reason, when the engine lacks one of `features`."""
        for feature in features:
            if feature in self.lacks:
                pytest.skip(f"{feature.name}: {self.lacks[feature]}")


ENGINES: dict[str, Callable[[], EngineCase]] = {}


SLOW_ENGINES: set[str] = set()
"""Their tests carry the mark `slow`."""


def register(name: str, *, slow: bool = False) -> Callable[[Callable[[], EngineCase]], Callable[[], EngineCase]]:
    """Decorator: the function below it builds the case of engine `name`."""

    def add(build: Callable[[], EngineCase]) -> Callable[[], EngineCase]:
        assert name not in ENGINES, f"engine {name!r} is registered twice"
        ENGINES[name] = build
        if slow:
            SLOW_ENGINES.add(name)
        return build

    return add


def _fake_case(make: Callable[..., StepEngine[Any]], *, stale_cache: StaleCache | None = None) -> EngineCase:
    """A case of FakeEngine; with `stale_cache` it reuses prefixes under that policy."""
    from common.serving import fake_model

    def wrong_weights() -> dict[str, object]:
        good = fake_model.make_weights(1, MIN_VOCAB_SIZE)
        return {
            "a missing name": {"table": good["table"]},
            "a wrong shape": {**good, "bias": good["bias"][:-1]},
            "a wrong dtype": {**good, "table": good["table"].astype("float64")},
            "a value that is no number": {**good, "bias": good["bias"] * float("nan")},
        }

    return EngineCase(
        make=lambda: make(fake_model.make_weights(0, MIN_VOCAB_SIZE)),
        weights=lambda seed: fake_model.make_weights(seed, MIN_VOCAB_SIZE),
        wrong_weights=wrong_weights,
        logprob_atol=0.0,
        lacks={} if stale_cache else {Feature.PREFIX_REUSE: "switched off in this case"},
        stale_cache=stale_cache or StaleCache.KEEP,
        token_text=fake_model.token_text,
    )


@register("fake")
def fake() -> EngineCase:
    from common.serving.fake import FakeEngine

    return _fake_case(lambda weights: FakeEngine(weights, max_slots=MAX_SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS))


@register("fake-prefix-keep")
def fake_prefix_keep() -> EngineCase:
    return _fake_prefix(StaleCache.KEEP)


@register("fake-prefix-drop")
def fake_prefix_drop() -> EngineCase:
    return _fake_prefix(StaleCache.DROP)


@register("fake-prefix-tag")
def fake_prefix_tag() -> EngineCase:
    return _fake_prefix(StaleCache.TAG)


def _fake_prefix(stale_cache: StaleCache) -> EngineCase:
    from common.serving.fake import FakeEngine

    def make(weights: dict) -> FakeEngine:
        return FakeEngine(
            weights,
            max_slots=MAX_SLOTS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            cache_capacity_tokens=2 * MAX_CONTEXT_TOKENS,
            prefix_reuse=True,
            stale_cache=stale_cache,
        )

    return _fake_case(make, stale_cache=stale_cache)


@register("fake-small-cache")
def fake_small_cache() -> EngineCase:
    """A cache that holds a quarter of the slots: requests lose it to each other all the time."""
    from common.serving.fake import FakeEngine

    def make(weights: dict) -> FakeEngine:
        return FakeEngine(
            weights, max_slots=MAX_SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS, cache_capacity_tokens=MAX_CONTEXT_TOKENS
        )

    return _fake_case(make)


@register("fake-async")
def fake_async() -> EngineCase:
    from common.clock import FakeClock
    from common.serving.fake import FakeEngine

    def make(weights: dict) -> FakeEngine:
        return FakeEngine(weights, max_slots=MAX_SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS, clock=FakeClock(), asynchronous=True)

    return _fake_case(make)


@register("fake-two-rank")
def fake_two_rank() -> EngineCase:
    from common.clock import FakeClock
    from common.serving.fake import FakeEngine
    from common.serving.fake_ranks import TwoRankFakeEngine

    def make(weights: dict) -> TwoRankFakeEngine:
        leader, follower = (
            FakeEngine(weights, max_slots=MAX_SLOTS, max_context_tokens=MAX_CONTEXT_TOKENS, clock=clock, asynchronous=True)
            for clock in (FakeClock(), None)
        )
        return TwoRankFakeEngine(leader, follower)

    return _fake_case(make)


TINY_QWEN3 = {
    "vocab_size": MIN_VOCAB_SIZE,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "tie_word_embeddings": True,
}
TINY_QWEN3_EMBEDDING_STD = 0.35
"""Logits then have a spread of about 2."""


@functools.cache  # drawing weights compiles a program each time
def _tiny_qwen3_weights(seed: int, **changes: int) -> Any:
    """float32 parameters of a tiny Qwen3 as an nnx.State."""
    from flax import nnx

    from rose_jax.models.qwen3 import create_model
    from rose_jax.models.qwen3_config import Qwen3Config

    config = Qwen3Config(**{**TINY_QWEN3, **changes})
    return nnx.state(create_model(config, seed=seed, embedding_init_std=TINY_QWEN3_EMBEDDING_STD))


def _wrong_tiny_qwen3_weights() -> dict[str, object]:
    return {
        "a wrong shape": _tiny_qwen3_weights(1, intermediate_size=48),
        "a layer too few": _tiny_qwen3_weights(1, num_layers=1),
    }


def _jetstream_case(stale_cache: StaleCache, **options: Any) -> EngineCase:
    pytest.importorskip("jax")
    from common.serving.fake_model import token_text
    from rose_jax.jetstream.config import JetStreamConfig
    from rose_jax.jetstream.engine import JetStreamEngine
    from rose_jax.models.qwen3_config import Qwen3Config

    def make() -> JetStreamEngine:
        config = JetStreamConfig(
            max_slots=MAX_SLOTS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            page_tokens=8,
            tile_tokens=8,
            max_prefill_tiles=8,
            row_buckets=(MAX_SLOTS,),
            tile_buckets=(8,),
            max_top_logprobs=MIN_VOCAB_SIZE,
            stale_cache=stale_cache,
            **options,
        )
        return JetStreamEngine(
            config,
            Qwen3Config(**TINY_QWEN3),
            _tiny_qwen3_weights(0),
            version=0,
            decode=lambda token_ids: "".join(map(token_text, token_ids)),
        )

    return EngineCase(
        make=make,
        weights=_tiny_qwen3_weights,
        wrong_weights=_wrong_tiny_qwen3_weights,
        logprob_atol=0.0 if options.get("invariant") else 1e-5,
        token_text=token_text,
        stale_cache=stale_cache,
        reuse=True,
        num_random_schedules=20,
    )


@register("jetstream")
def jetstream() -> EngineCase:
    return _jetstream_case(StaleCache.KEEP)


@register("jetstream-tag-two-chunks")
def jetstream_tag() -> EngineCase:
    """The cache in two chunks that hold less than all slots need, cached state tagged with its version."""
    return _jetstream_case(StaleCache.TAG, num_chunks=2, pages_per_chunk=10)


@register("jetstream-invariant")
def jetstream_invariant() -> EngineCase:
    return _jetstream_case(StaleCache.DROP, invariant=True)


VLLM_QWEN3 = {**TINY_QWEN3, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
"""Attention of vLLM on CPU needs heads of at least 32."""
VLLM_EMBEDDING_STD = 0.2


@functools.cache
def _vllm_tensors(seed: int, **changes: Any) -> dict[str, Any]:
    """float32 weights of a small Qwen3 under their checkpoint names."""
    import numpy as np
    from flax import nnx

    from rose_jax.export import named_tensors
    from rose_jax.models.qwen3 import create_model
    from rose_jax.models.qwen3_config import Qwen3Config

    model = create_model(Qwen3Config(**{**VLLM_QWEN3, **changes}), seed=seed, embedding_init_std=VLLM_EMBEDDING_STD)
    return {name: np.asarray(tensor) for name, tensor in named_tensors(nnx.state(model))}


@functools.cache
def _vllm_folder() -> tempfile.TemporaryDirectory:
    """A checkpoint of the model whose weights are _vllm_tensors(0); it goes when the tests end."""
    from rose_jax.hf_folder import write_folder
    from rose_jax.models.qwen3_config import Qwen3Config

    folder = tempfile.TemporaryDirectory(prefix="rose_vllm_")
    fields = Qwen3Config(**VLLM_QWEN3).to_hf() | {"dtype": "float32", "torch_dtype": "float32"}
    write_folder(Path(folder.name), config_fields=fields, shards=iter([_vllm_tensors(0)]), write_extra=None, overwrite=True)
    return folder


def _vllm_case(stale_cache: StaleCache, *, own_process: bool = False, **options: Any) -> EngineCase:
    from rose_gpu.vllm.environment import installed_vllm

    if installed_vllm() is None:
        pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt")
    from common.serving.fake_model import token_text
    from rose_gpu.vllm.direct_update import whole_update
    from rose_gpu.vllm.engine import VllmEngine
    from rose_gpu.vllm.group import WorkerGroup
    from rose_gpu.vllm.options import VllmOptions

    def make() -> VllmEngine | WorkerGroup:
        engine_options = VllmOptions(
            model_dir=_vllm_folder().name,
            max_slots=MAX_SLOTS,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            stale_cache=stale_cache,
            **options,
        )
        form = WorkerGroup if own_process else VllmEngine
        return form(engine_options, decode=lambda token_ids: "".join(map(token_text, token_ids)))

    def wrong_weights() -> dict[str, object]:
        incomplete = whole_update(_vllm_tensors(1))
        del incomplete.runs[3]
        return {
            "a wrong shape": whole_update(_vllm_tensors(1, intermediate_size=48)),
            "a layer too few": whole_update(_vllm_tensors(1, num_layers=1)),
            "a wrong dtype": whole_update({name: value.astype("float16") for name, value in _vllm_tensors(1).items()}),
            "a run that never came": incomplete,
        }

    return EngineCase(
        make=make,
        weights=lambda seed: whole_update(_vllm_tensors(seed)),
        wrong_weights=wrong_weights,
        logprob_atol=1e-5,
        token_text=token_text,
        stale_cache=stale_cache,
        reuse=True,
        num_random_schedules=10,
    )


@register("vllm")
def vllm() -> EngineCase:
    return _vllm_case(StaleCache.KEEP)


@register("vllm-tag-small-cache")
def vllm_tag() -> EngineCase:
    """A cache that holds five blocks of four slots' eight: requests lose it to each other."""
    return _vllm_case(StaleCache.TAG, cache_tokens=160)


@register("vllm-drop")
def vllm_drop() -> EngineCase:
    return _vllm_case(StaleCache.DROP)


@register("vllm-group", slow=True)
def vllm_group() -> EngineCase:
    """vLLM in a process of its own; each start costs an import of vLLM."""
    return _vllm_case(StaleCache.TAG, own_process=True)


@register("vllm-group-two-ranks", slow=True)
def vllm_two_ranks() -> EngineCase:
    return _vllm_case(StaleCache.DROP, own_process=True, tensor_parallel=2)
