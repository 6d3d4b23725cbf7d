"""A first StepEngine in JAX: dense cache slots, whole-prompt prefill, every live request decoded together.

Refuses chunked prefill and prefix reuse: a step either prefills waiting requests or decodes all running ones. Shapes come from a
short list of buckets, so that few programs are compiled. Rows are computed independently of each other within one shape.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, UInt32

from common.errors import RequestRejectedError
from common.serving.engine import DecodeEntry, EngineInfo, EngineLoad, PrefillChunk, SampledToken, StepLimits, StepPlan, StepResult
from common.types import Completion, FinishReason, Request
from rose_jax.models.qwen3 import Qwen3, Qwen3Config, causal_attention
from rose_jax.sampling import KEY_WORDS, key_words, sample_tokens

PREFILL_ROWS = (4, 16, 64)
PREFILL_TOKENS = 64
"""Prompts are padded to a multiple of this, so that a context of 384 needs six programs at most."""
Cache = list[tuple[Array, Array]]


@dataclasses.dataclass
class _Live:
    """A queued or running request; `slot_idx` is None while it waits."""

    request: Request
    order: int
    slot_idx: int | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)

    @property
    def context_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.token_ids)


def _bucket(value: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= value), sizes[-1])


class JaxEngine:
    """See common.serving.engine.StepEngine. `commit` takes parameters as an nnx.State in the dtype to compute in."""

    def __init__(
        self, model_config: Qwen3Config, params: nnx.State, *, max_slots: int, max_context_tokens: int, version: int
    ) -> None:
        self._info = EngineInfo(
            name="jax-dense", vocab_size=model_config.vocab_size, max_slots=max_slots, max_context_tokens=max_context_tokens
        )
        self._params, self._version = params, version
        self._waiting: list[_Live] = []
        self._running: dict[int, _Live] = {}
        self._ended: list[Completion] = []
        self._num_added = 0
        self._num_steps = 0
        self._result: StepResult | None = None
        dtype = jax.tree.leaves(params)[0].dtype
        shape = (max_slots, max_context_tokens, model_config.num_kv_heads, model_config.head_dim)
        self._cache: Cache = [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model_config.num_layers)]
        graph = nnx.graphdef(nnx.eval_shape(lambda: Qwen3(model_config, rngs=nnx.Rngs(0))))
        self._prefill = _jit_prefill(graph)
        self._decode = _jit_decode(graph)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            used_cache_tokens=sum(len(live.context_ids) for live in self._running.values()),
            capacity_cache_tokens=self._info.max_slots * self._info.max_context_tokens,
            weight_version=self._version,
        )

    def add(self, request: Request) -> None:
        ids, room = request.prompt_token_ids, self._info.max_context_tokens
        if not ids:
            raise RequestRejectedError(f"request {request.request_id}: the prompt is empty; send at least one token")
        if len(ids) + request.sampling.max_tokens > room:
            raise RequestRejectedError(
                f"request {request.request_id}: {len(ids)} prompt tokens + max_tokens={request.sampling.max_tokens} exceed the "
                f"context of {room} tokens; shorten one of them"
            )
        unknown = [token for token in ids if not 0 <= token < self._info.vocab_size]
        if unknown:
            raise RequestRejectedError(
                f"request {request.request_id}: token id {unknown[0]} is outside the vocabulary of {self._info.vocab_size}"
            )
        key_words(request.key)
        self._waiting.append(_Live(request=request, order=self._num_added))
        self._waiting.sort(key=lambda live: (-live.request.priority, live.order))
        self._num_added += 1

    def abort(self, request_id: str) -> None:
        for live in [*self._waiting, *self._running.values()]:
            if live.request.request_id == request_id:
                self._end(live, FinishReason.ABORTED)

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        del keep_cache  # a dense slot is always given up; its tokens are computed again on resume
        for live in list(self._running.values()):
            if live.request.request_id == request_id:
                self._release(live)
                self._waiting.append(live)
                self._waiting.sort(key=lambda live: (-live.request.priority, live.order))

    def plan(self, limits: StepLimits) -> StepPlan | None:
        prefill: list[PrefillChunk] = []
        free = [slot_idx for slot_idx in range(self._info.max_slots) if slot_idx not in self._running]
        budget = limits.max_tokens
        for live, slot_idx in zip(self._waiting[: PREFILL_ROWS[-1]], free, strict=False):
            num_tokens = len(live.context_ids)
            if num_tokens > budget:
                break
            budget -= num_tokens
            prefill.append(PrefillChunk(request_id=live.request.request_id, slot_idx=slot_idx, start=0, num_tokens=num_tokens))
        decode: list[DecodeEntry] = []
        if not prefill:
            for slot_idx, live in sorted(self._running.items(), key=lambda item: item[1].order)[: limits.max_tokens]:
                entry = DecodeEntry(request_id=live.request.request_id, slot_idx=slot_idx, context_tokens=len(live.context_ids) - 1)
                decode.append(entry)
        if not prefill and not decode and not self._ended:
            return None
        return StepPlan(step_id=self._num_steps, prefill=tuple(prefill), decode=tuple(decode))

    def submit(self, plan: StepPlan) -> None:
        assert self._result is None, "one step at a time"
        assert plan.step_id == self._num_steps, "only the newest plan"
        self._num_steps += 1
        started_s = time.perf_counter()
        if plan.prefill:
            lives = self._admit(plan.prefill)
            tokens = self._run_prefill(lives)
        else:
            lives = [self._running[entry.slot_idx] for entry in plan.decode]
            tokens = self._run_decode(lives) if lives else []
        completions, self._ended = self._ended, []
        self._result = StepResult(
            step_id=plan.step_id, tokens=tuple(tokens), completions=tuple(completions), device_s=time.perf_counter() - started_s
        )

    def collect(self) -> StepResult:
        assert self._result is not None, "collect without submit"
        result, self._result = self._result, None
        return result

    def drain(self) -> StepResult | None:
        return self.collect() if self._result is not None else None

    def commit(self, weights: nnx.State, *, version: int) -> None:
        assert self._result is None, "commit before drain"
        old, new = jax.tree.map(jnp.shape, self._params), jax.tree.map(jnp.shape, weights)
        if old != new:
            raise ValueError(f"weights of version {version} do not have the shapes this engine was built with")
        self._params, self._version = weights, version

    def close(self) -> None:
        self._cache = []

    def _admit(self, chunks: tuple[PrefillChunk, ...]) -> list[_Live]:
        waiting = {live.request.request_id: live for live in self._waiting}
        lives = [waiting[chunk.request_id] for chunk in chunks]
        for live, chunk in zip(lives, chunks, strict=True):
            live.slot_idx = chunk.slot_idx
            self._running[chunk.slot_idx] = live
        self._waiting = [live for live in self._waiting if live.slot_idx is None]
        return lives

    def _run_prefill(self, lives: list[_Live]) -> list[SampledToken]:
        rows = _bucket(len(lives), PREFILL_ROWS)
        longest = max(len(live.context_ids) for live in lives)
        width = min(-(-longest // PREFILL_TOKENS) * PREFILL_TOKENS, self._info.max_context_tokens)
        token_ids, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
        slots = np.full(rows, self._info.max_slots, np.int32)  # out of range: writes of padding rows are dropped
        for row, live in enumerate(lives):
            lengths[row] = len(live.context_ids)
            token_ids[row, : lengths[row]] = live.context_ids
            assert live.slot_idx is not None
            slots[row] = live.slot_idx
        self._cache, sampled, logprobs = self._prefill(
            self._params, self._cache, token_ids, lengths, slots, *self._draw_inputs(lives, list(range(len(lives))), rows)
        )
        return self._record(lives, np.asarray(sampled)[: len(lives)], np.asarray(logprobs)[: len(lives)])

    def _run_decode(self, lives: list[_Live]) -> list[SampledToken]:
        slots = [live.slot_idx for live in lives if live.slot_idx is not None]
        tokens = np.zeros(self._info.max_slots, np.int32)
        positions = np.full(self._info.max_slots, self._info.max_context_tokens, np.int32)  # idle rows write nowhere
        for slot_idx, live in zip(slots, lives, strict=True):
            tokens[slot_idx] = live.token_ids[-1]
            positions[slot_idx] = len(live.context_ids) - 1
        self._cache, sampled, logprobs = self._decode(
            self._params, self._cache, tokens, positions, *self._draw_inputs(lives, slots, self._info.max_slots)
        )
        return self._record(lives, np.asarray(sampled)[slots], np.asarray(logprobs)[slots])

    def _draw_inputs(self, lives: list[_Live], rows: list[int], num_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys, positions = np.zeros((num_rows, KEY_WORDS), np.uint32), np.zeros(num_rows, np.int32)
        temperatures = np.zeros(num_rows, np.float32)
        for row, live in zip(rows, lives, strict=True):
            keys[row] = key_words(live.request.key)
            positions[row] = len(live.token_ids)
            temperatures[row] = live.request.sampling.temperature
        return keys, positions, temperatures

    def _record(self, lives: list[_Live], sampled: np.ndarray, logprobs: np.ndarray) -> list[SampledToken]:
        tokens = []
        for live, token_id, logprob in zip(lives, sampled.tolist(), logprobs.tolist(), strict=True):
            live.token_ids.append(token_id)
            live.logprobs.append(logprob)
            live.versions.append(self._version)
            tokens.append(
                SampledToken(
                    request_id=live.request.request_id, token_id=token_id, behavior_logprob=logprob, weight_version=self._version
                )
            )
            if token_id in live.request.sampling.stop_token_ids:
                self._end(live, FinishReason.STOP)
            elif len(live.token_ids) == live.request.sampling.max_tokens:
                self._end(live, FinishReason.LENGTH)
        return tokens

    def _release(self, live: _Live) -> None:
        if live.slot_idx is not None:
            del self._running[live.slot_idx]
            live.slot_idx = None

    def _end(self, live: _Live, reason: FinishReason) -> None:
        self._release(live)
        self._waiting = [other for other in self._waiting if other is not live]
        self._ended.append(
            Completion(
                request_id=live.request.request_id,
                token_ids=tuple(live.token_ids),
                behavior_logprobs=tuple(live.logprobs),
                weight_versions=tuple(live.versions),
                finish_reason=reason,
            )
        )


def _jit_prefill(graph: nnx.GraphDef) -> Callable:
    @jax.jit(donate_argnums=1)
    def prefill(
        params: nnx.State,
        cache: Cache,
        token_ids: Int32[Array, "P T"],
        lengths: Int32[Array, "P"],
        slots: Int32[Array, "P"],
        keys: UInt32[Array, "P 3"],
        draw_positions: Int32[Array, "P"],
        temperatures: Float[Array, "P"],
    ) -> tuple[Cache, Array, Array]:
        model, cache = nnx.merge(graph, params), list(cache)

        def attend(layer_idx: int, q: Array, k: Array, v: Array) -> Array:
            cached_k, cached_v = cache[layer_idx]
            width = k.shape[1]
            cache[layer_idx] = (
                cached_k.at[slots, :width].set(k, mode="drop"),
                cached_v.at[slots, :width].set(v, mode="drop"),
            )
            return causal_attention(layer_idx, q, k, v)

        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
        hidden = model(token_ids, positions, attend)
        last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return cache, *sample_tokens(model.logits(last), keys, draw_positions, temperatures)

    return prefill


def _jit_decode(graph: nnx.GraphDef) -> Callable:
    @jax.jit(donate_argnums=1)
    def decode(
        params: nnx.State,
        cache: Cache,
        tokens: Int32[Array, "S"],
        positions: Int32[Array, "S"],
        keys: UInt32[Array, "S 3"],
        draw_positions: Int32[Array, "S"],
        temperatures: Float[Array, "S"],
    ) -> tuple[Cache, Array, Array]:
        model, cache = nnx.merge(graph, params), list(cache)
        rows = jnp.arange(tokens.shape[0])

        def attend(layer_idx: int, q: Array, k: Array, v: Array) -> Array:
            cached_k, cached_v = cache[layer_idx]
            cached_k = cached_k.at[rows, positions].set(k[:, 0], mode="drop")
            cached_v = cached_v.at[rows, positions].set(v[:, 0], mode="drop")
            cache[layer_idx] = (cached_k, cached_v)
            visible = jnp.arange(cached_k.shape[1])[None, :] <= positions[:, None]
            return jax.nn.dot_product_attention(q, cached_k, cached_v, mask=visible[:, None, None, :])

        hidden = model(tokens[:, None], positions[:, None], attend)
        return cache, *sample_tokens(model.logits(hidden[:, 0]), keys, draw_positions, temperatures)

    return decode
