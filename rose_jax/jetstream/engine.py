"""JetStreamEngine: the StepEngine of JAX. Paged cache, mixed prefill and decode, prefix reuse, preemption, hot weight swap.

The scheduler decides on the host, step_inputs turns its plan into arrays, a StepRunner computes them; this file keeps the requests:
what was sampled, what ends, what is an error. A request that cannot run fails alone; if the device fails, the requests of that step
end with the error and all others go on from their tokens. It refuses option values it was not built for when a request is added.
Invariant: see StepEngine; besides, a plan's token count is never above its limits, whatever the padding.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import DecodeEntry, EngineInfo, EngineLoad, PrefillChunk, SampledToken, StepLimits, StepPlan, StepResult
from common.serving.rejection import why_never
from common.serving.stop_strings import Decode, completes_stop_string
from common.types import Completion, FinishReason, Request
from rose_jax.jetstream.compute import Drawn
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.runner import StepRunner, WarmUp
from rose_jax.jetstream.scheduler import Scheduler
from rose_jax.jetstream.sequence import Piece, Sequence
from rose_jax.jetstream.step_inputs import (
    NO_STEP,
    NO_TOKEN,
    ROW_PAGES,
    TILE_TOKENS,
    PackedStep,
    SlotTable,
    StepInputs,
    pack,
    pack_units,
)
from rose_jax.models.qwen3_config import Qwen3Config

MIN_TEMPERATURE = 1e-5
"""Below it the rounding of a tempered logit, some 1e-7 of it, may exceed what float32 can exponentiate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JetStreamPlan(StepPlan):
    """A plan with everything a StepRunner in another process needs to run it; `inputs` is None when there is nothing to compute."""

    inputs: StepInputs | None

    @property
    def computed(self) -> tuple[int, int, int]:
        if self.inputs is None or self.inputs.num_units is not None:  # nothing, or always the same shape
            return super().computed
        num_chunks, num_rows, row_columns = self.inputs.rows.shape
        num_tiles, num_pages = self.inputs.tiles.shape[1], row_columns - ROW_PAGES
        tile_tokens = self.inputs.tiles.shape[2] - TILE_TOKENS - num_pages
        num_rows *= max((entry.num_tokens for entry in self.decode), default=1)
        context_tokens = (num_rows + num_tiles) * num_pages * tile_tokens
        return num_chunks * num_tiles * tile_tokens, num_chunks * num_rows, num_chunks * context_tokens


@dataclasses.dataclass(kw_only=True)
class _InFlight:
    plan: JetStreamPlan
    step: PackedStep
    drawn: Drawn | None
    started_s: float
    error: str | None = None


class JetStreamEngine:
    """See the module and common.serving.engine.StepEngine. `commit` takes an nnx.State like the one it was built with.

    Args:
        params: parameters in the dtype to compute in; the engine's from then on, nobody may donate them.
        decode: needed by requests with stop strings.
        mesh: see StepRunner.
    """

    def __init__(
        self,
        config: JetStreamConfig,
        model_config: Qwen3Config,
        params: nnx.State,
        *,
        version: int,
        decode: Decode | None = None,
        mesh: Mesh | None = None,
        name: str = "jetstream",
    ) -> None:
        self.config = config
        self._info = EngineInfo(
            name=name,
            vocab_size=model_config.vocab_size,
            max_slots=config.max_slots,
            max_context_tokens=config.max_context_tokens,
        )
        self._runner = StepRunner(config, model_config, params, mesh=mesh)
        self._scheduler = Scheduler(config, version=version)
        self._table = SlotTable(config, vocab_size=model_config.vocab_size)
        self._decode = decode
        self._live: dict[str, Sequence] = {}
        self._ended: list[Completion] = []
        self._aborted: list[Sequence] = []
        self._num_added = 0
        self._num_steps = 0
        self._moving = False
        self._planned: tuple[JetStreamPlan, list[Piece], PackedStep] | None = None
        self._in_flight: _InFlight | None = None
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def cache_bytes(self) -> int:
        """Bytes the cache holds on all devices."""
        return self._runner.cache_bytes

    def load(self) -> EngineLoad:
        running, waiting = self._scheduler.running, self._scheduler.waiting
        page_tokens = self.config.page_tokens
        num_pages = sum(pool.num_pages for pool in self._scheduler.pools)
        num_idle = sum(pool.num_idle for pool in self._scheduler.pools)
        num_available = sum(pool.num_available for pool in self._scheduler.pools)
        return EngineLoad(
            running_requests=len(running),
            waiting_requests=len(waiting),
            used_cache_tokens=(num_pages - num_available) * page_tokens,
            capacity_cache_tokens=num_pages * page_tokens,
            weight_version=self._scheduler.version,
            reclaimable_cache_tokens=num_idle * page_tokens,
        )

    def warm_up(self) -> WarmUp:
        """Compile every program that a step can need; nothing compiles after it. Call while no step is submitted."""
        self._check_idle("warm up")
        return self._runner.warm_up()

    def add(self, request: Request) -> None:
        self._check_open()
        problem = why_never(request, self._info) or self._why_not_here(request)
        if problem is not None:
            raise RequestRejectedError(f"request {request.request_id}: {problem}")
        sequence = Sequence.start(request, arrival=self._num_added)
        self._num_added += 1
        self._live[request.request_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        self._check_open()
        sequence = self._live.get(request_id)
        if sequence is None or sequence.aborted:
            return
        sequence.aborted = True
        if self._planned is None and self._in_flight is None:
            self._end(sequence, FinishReason.ABORTED)
        else:
            self._aborted.append(sequence)  # the step at hand may compute it

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        self._check_idle("preempt")
        self._forget_plan()
        sequence = self._live.get(request_id)
        if sequence is not None and sequence.slot_idx is not None:
            self._scheduler.preempt(sequence, keep_cache=keep_cache)

    def plan(self, limits: StepLimits) -> JetStreamPlan | None:
        self._check_idle("plan")
        if limits.max_tokens < 1:
            raise ValueError(f"StepLimits.max_tokens={limits.max_tokens}: a step needs room for at least 1 token")
        self._forget_plan()
        pieces = self._scheduler.plan(limits.max_tokens, limits.tokens_per_sequence)
        if not pieces and not self._ended:
            return None
        prefill: list[PrefillChunk] = []
        decode: list[DecodeEntry] = []
        for sequence, start, end, decodes, max_draws in pieces:
            request_id, slot_idx = sequence.request.request_id, sequence.slot_idx
            assert slot_idx is not None
            if decodes:
                entry = DecodeEntry(request_id=request_id, slot_idx=slot_idx, context_tokens=start, num_tokens=max_draws)
                decode.append(entry)
            else:
                chunk = PrefillChunk(request_id=request_id, slot_idx=slot_idx, start=start, num_tokens=end - start)
                prefill.append(chunk)
        step = NO_STEP
        if pieces:
            pack_step = pack_units if self.config.invariant else pack
            step = pack_step(self.config, self._table, pieces, len(self._scheduler.pools))
        plan = JetStreamPlan(step_id=self._num_steps, prefill=tuple(prefill), decode=tuple(decode), inputs=step.inputs)
        self._planned = (plan, pieces, step)
        return plan

    def submit(self, plan: StepPlan) -> None:
        self._check_idle("submit")
        assert self._planned is not None, "submit without a plan; plan first, and submit each plan once"
        assert plan is self._planned[0], "only the newest plan can be submitted"
        newest, pieces, step = self._planned
        self._planned = None
        self._num_steps += 1
        self._scheduler.advance(pieces)
        self._in_flight = _InFlight(plan=newest, step=step, drawn=None, started_s=time.perf_counter())
        if newest.inputs is not None:
            try:
                self._in_flight.drawn = self._runner.run(newest.inputs)
            except jax.errors.JaxRuntimeError as error:
                self._in_flight.error = str(error)

    def collect(self) -> StepResult:
        self._check_open()
        assert self._in_flight is not None or self._ended or self._aborted, "collect without a submitted step"
        flight = self._in_flight
        tokens: tuple[SampledToken, ...] = ()
        device_s = 0.0
        if flight is not None:
            tokens, device_s = self._finish(flight)
            self._in_flight = None
        else:
            self._forget_plan()
        self._end_aborted()
        completions, self._ended = tuple(self._ended), []
        step_id = self._num_steps if flight is None else flight.plan.step_id
        return StepResult(step_id=step_id, tokens=tokens, completions=completions, device_s=device_s)

    def drain(self) -> StepResult | None:
        self._check_open()
        return self.collect() if self._in_flight is not None or self._ended or self._aborted else None

    def commit(self, weights: nnx.State, *, version: int) -> None:
        self._check_idle("commit")
        self._runner.load(weights)
        self._forget_plan()
        self._scheduler.change_version(version)

    def park(self) -> Iterator[None]:
        """Give up the cache and move weights in host memory to a file (common.serving.parking); elsewhere they stay where they are.

        Call after `drain`, while no request is live; activate before the next step.

        Raises:
            OSError: the file cannot hold them; all weights are right.
        """
        self._check_idle("park")
        if self._live:
            raise ValueError(f"park: {len(self._live)} requests are live; let them end or abort them first")
        self._forget_plan()
        self._scheduler.drop_caches()
        yield from self._moving_by(self._runner.park())

    def activate(self) -> Iterator[None]:
        """The inverse of `park`: weights are in memory again, the cache is empty."""
        self._check_idle("activate")
        yield from self._moving_by(self._runner.activate())

    def _moving_by(self, pieces: Iterator[None]) -> Iterator[None]:
        self._moving = True
        try:
            yield from pieces
        finally:
            self._moving = False

    def remove_chunk(self) -> None:
        """Give the memory of the last cache chunk back to the device; requests there are preempted and computed again elsewhere.

        Call only when no step is submitted. Compiles nothing after `warm_up` with `min_chunks` set.
        """
        self._check_idle("remove a chunk")
        if self._runner.num_chunks <= self.config.fewest_chunks:
            raise ValueError(f"the cache has {self._runner.num_chunks} chunks and min_chunks={self.config.fewest_chunks}; lower it")
        self._forget_plan()
        self._scheduler.remove_chunk()
        self._runner.remove_chunk()

    def add_chunk(self) -> None:
        """Take memory for one more cache chunk, up to `num_chunks`. Call only when no step is submitted."""
        self._check_idle("add a chunk")
        if self._runner.num_chunks >= self.config.num_chunks:
            raise ValueError(f"the cache has all of its num_chunks={self.config.num_chunks} chunks; raise it")
        self._forget_plan()
        self._runner.add_chunk()
        self._scheduler.add_chunk()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._live.clear()
            self._runner.close()

    def _why_not_here(self, request: Request) -> str | None:
        params = request.sampling
        if request.request_id in self._live or any(end.request_id == request.request_id for end in self._ended):
            return "the id is in use until its completion was collected; ids must be unique"
        if 0.0 < params.temperature < MIN_TEMPERATURE:
            return f"temperature={params.temperature}: logits divided by it overflow; use 0 (greedy) or at least {MIN_TEMPERATURE}"
        if params.num_top_logprobs > self.config.max_top_logprobs:
            return f"num_top_logprobs={params.num_top_logprobs} is above this engine's limit of {self.config.max_top_logprobs}"
        if params.stop_strings and self._decode is None:
            return "it has stop strings, but this engine was built without `decode`; pass stop_token_ids"
        return None

    def _finish(self, flight: _InFlight) -> tuple[tuple[SampledToken, ...], float]:
        """Wait for the step's outputs and hand them to their sequences."""
        step = flight.step
        tokens: list[list[int]] = []
        logprobs: list[list[float]] = []
        top: list[list[tuple[int, float]]] = []
        if flight.drawn is not None:
            try:
                tokens = np.asarray(flight.drawn.token_ids)[step.output_rows].tolist()
                logprobs = np.asarray(flight.drawn.logprobs)[step.output_rows].tolist()
                if step.inputs is not None and step.inputs.with_options:
                    top = _top_pairs(flight.drawn, step.output_rows)
            except jax.errors.JaxRuntimeError as error:
                flight.error = str(error)
        device_s = time.perf_counter() - flight.started_s
        if flight.error is not None:
            self._recover(flight)
            return (), device_s
        streamed: list[SampledToken] = []
        spoilt: list[Sequence] = []
        for idx, sequence in enumerate(step.sampling):
            if not sequence.aborted and not self._take(sequence, tokens[idx], logprobs[idx], top[idx] if top else [], streamed):
                spoilt.append(sequence)
        if spoilt:
            self._purge(spoilt)
        return tuple(streamed), device_s

    def _take(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: list[float],
        top: list[tuple[int, float]],
        streamed: list[SampledToken],
    ) -> bool:
        """Give a sequence what it drew in a step, and end it where that ends it. False at logits that are not finite."""
        request_id, version = sequence.request.request_id, self._scheduler.version
        for draw_idx, token_id in enumerate(token_ids):
            if token_id == NO_TOKEN:
                break
            logprob = logprobs[draw_idx]
            if not math.isfinite(logprob):
                return False
            if draw_idx:
                sequence.num_computed += 1  # the step fed the token before
            sequence.token_ids.append(token_id)
            sequence.context.append(token_id)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            token_top = tuple(top[: sequence.request.sampling.num_top_logprobs])
            if token_top:
                sequence.top_logprobs.append(token_top)
            streamed.append(
                SampledToken(
                    request_id=request_id,
                    token_id=token_id,
                    behavior_logprob=logprob,
                    weight_version=version,
                    top_logprobs=token_top,
                )
            )
            if self._end_if_done(sequence):
                break
        return True

    def _end_if_done(self, sequence: Sequence) -> bool:
        params = sequence.request.sampling
        reason = error = None
        if sequence.token_ids[-1] in params.stop_token_ids:
            reason = FinishReason.STOP
        elif params.stop_strings:
            assert self._decode is not None
            try:
                if completes_stop_string(sequence.token_ids, params.stop_strings, self._decode):
                    reason = FinishReason.STOP
            except Exception as failure:  # the caller's function: its failure is this request's alone
                reason, error = FinishReason.ERROR, f"decoding the tokens to look for stop strings failed: {failure!r}"
        if reason is None and len(sequence.token_ids) == params.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence, reason, error=error)
        return reason is not None

    def _end(self, sequence: Sequence, reason: FinishReason, *, error: str | None = None) -> None:
        self._scheduler.remove(sequence)
        del self._live[sequence.request.request_id]
        self._ended.append(sequence.completion(reason, error=error))

    def _end_aborted(self) -> None:
        aborted, self._aborted = self._aborted, []
        for sequence in aborted:
            if sequence.request.request_id in self._live:
                self._end(sequence, FinishReason.ABORTED)

    def _recover(self, flight: _InFlight) -> None:
        """The device failed: the cache is lost. The step's requests end with the error, the others are computed again."""
        in_step = [chunk.request_id for chunk in flight.plan.prefill] + [entry.request_id for entry in flight.plan.decode]
        self._reset_caches()
        for request_id in in_step:
            sequence = self._live[request_id]
            if not sequence.aborted:
                self._end(sequence, FinishReason.ERROR, error=f"request {request_id}: the device failed: {flight.error}")

    def _purge(self, spoilt: list[Sequence]) -> None:
        """Logits were not finite. Keys and values may not be either, and even masked ones spoil whoever gets their page: all go.

        A sequence may have got them with its pages, from a request or a version that is gone, so each is computed again once.
        """
        self._reset_caches()
        for sequence in spoilt:
            if sequence.purged:
                problem = f"the logits are not finite under weight version {self._scheduler.version}"
                self._end(sequence, FinishReason.ERROR, error=f"request {sequence.request.request_id}: {problem}")
            sequence.purged = True

    def _reset_caches(self) -> None:
        self._runner.reset_caches(self._runner.num_chunks)
        self._scheduler.drop_caches()

    def _forget_plan(self) -> None:
        if self._planned is not None:
            self._planned = None
            self._scheduler.undo()
        self._end_aborted()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"engine {self._info.name!r} was closed; make a new one")

    def _check_idle(self, action: str) -> None:
        self._check_open()
        assert self._in_flight is None, f"{action} with a step in flight; collect or drain first"
        assert not self._moving, f"{action} in the middle of parking or activating; exhaust or close its iterator first"


def _top_pairs(drawn: Drawn, rows: list[int]) -> list[list[tuple[int, float]]]:
    ids, values = np.asarray(drawn.top_token_ids)[rows].tolist(), np.asarray(drawn.top_logprobs)[rows].tolist()
    return [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in zip(ids, values, strict=True)]
