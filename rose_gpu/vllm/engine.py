"""VllmEngine: a StepEngine on vLLM's engine core, in this process; its workers are here too or, if several, its children.

What vLLM does in one call of its `step` is taken apart: our planner decides, vLLM's scheduler and workers carry out. One step is
in flight at most (vLLM's asynchronous scheduling is off), so that after `drain` no token of the old weights is still to come. If
the workers fail, every request ends with the error and the engine takes no more.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import (
    DecodeEntry,
    EngineInfo,
    EngineLoad,
    PrefillChunk,
    SampledToken,
    StaleCache,
    StepLimits,
    StepPlan,
    StepResult,
)
from common.serving.rejection import why_never
from common.serving.stop_strings import Decode, completes_stop_string
from common.transfer.staging import StagedUpdate
from common.types import Completion, FinishReason, Request
from rose_gpu.vllm import planner
from rose_gpu.vllm.core import describe_ended_workers, open_core, shut_down
from rose_gpu.vllm.environment import prepare, remove_shared_memory
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.requests import why_not_on_vllm
from rose_gpu.vllm.worker_weights import MAX_SLICE_BYTES, RankUpdate, WorkerWeights

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclasses.dataclass(kw_only=True)
class _InFlight:
    plan: StepPlan
    entries: tuple[planner.Entry, ...]
    started_s: float
    scheduled: Any = None
    forward: Any = None
    sampled: Any = None
    error: str | None = None


class VllmEngine:
    """See common.serving.engine.StepEngine and the module. Weights arrive as StagedUpdate.

    Args:
        version: of the weights in `options.model_dir`.
        decode: text of token ids, for requests with stop strings; without it those are refused.
    """

    def __init__(self, options: VllmOptions, *, version: int = 0, decode: Decode | None = None) -> None:
        prepare(tensor_parallel=options.tensor_parallel, kvcached=options.kvcached)
        self.options = options
        self._info = options.info()
        self._decode = decode
        self._core, self.shared_memory = open_core(options)
        self._scheduler = self._core.scheduler
        self.weights = WorkerWeights(self._core.collective_rpc, options.arriving_dtype, num_workers=options.tensor_parallel)
        self._version = version
        self._epoch = 0
        """Counts commits: a version may come back, cached state of it must not."""
        self._live: dict[str, planner.Sequence] = {}
        self._by_internal: dict[str, planner.Sequence] = {}
        self._ended: list[Completion] = []
        self._aborted: list[planner.Sequence] = []
        self._num_added = 0
        self._num_steps = 0
        self._planned: tuple[StepPlan, planner.Step] | None = None
        self._in_flight: _InFlight | None = None
        self._not_finite = False
        """Logits of the newest step were not, so keys and values in the cache may be."""
        self._committing = self._moving = False
        self._closed: str | None = None
        self._released = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    def load(self) -> EngineLoad:
        running = sum(sequence.slot_idx is not None for sequence in self._live.values())
        block_tokens, num_blocks = self.options.block_tokens, self._scheduler.num_blocks()
        return EngineLoad(
            running_requests=running,
            waiting_requests=len(self._live) - running,
            used_cache_tokens=(num_blocks - self._scheduler.num_free_blocks()) * block_tokens,
            capacity_cache_tokens=num_blocks * block_tokens,
            weight_version=self._version,
            reclaimable_cache_tokens=self._scheduler.num_idle_cached_blocks() * block_tokens,
        )

    def add(self, request: Request) -> None:
        self._check_open()
        problem = why_never(request, self._info) or why_not_on_vllm(request, self._live, can_decode=self._decode is not None)
        if problem is not None:
            raise RequestRejectedError(f"request {request.request_id}: {problem}")
        sequence = planner.Sequence(request=request, internal_id=str(self._num_added), arrival=self._num_added)
        self._num_added += 1
        self._core.add_request(self._vllm_request(sequence))
        self._live[request.request_id] = self._by_internal[sequence.internal_id] = sequence

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
            self._leave_slot(sequence, keep_cache=keep_cache)

    def plan(self, limits: StepLimits) -> StepPlan | None:
        self._check_idle("plan")
        if limits.max_tokens < 1:
            raise ValueError(f"StepLimits.max_tokens={limits.max_tokens}: a step needs room for at least 1 token")
        self._forget_plan()
        max_tokens = min(limits.max_tokens, self.options.max_step_tokens)
        step = planner.plan_step(self._live.values(), self._scheduler, max_slots=self._info.max_slots, max_tokens=max_tokens)
        if not step.entries and not self._ended:
            return None
        prefill = [entry for entry in step.entries if not entry.decodes]
        plan = StepPlan(
            step_id=self._num_steps,
            prefill=tuple(
                PrefillChunk(
                    request_id=entry.sequence.request.request_id,
                    slot_idx=entry.slot_idx,
                    start=entry.start,
                    num_tokens=entry.num_tokens,
                )
                for entry in prefill
            ),
            decode=tuple(
                DecodeEntry(request_id=entry.sequence.request.request_id, slot_idx=entry.slot_idx, context_tokens=entry.start)
                for entry in step.entries
                if entry.decodes
            ),
        )
        self._planned = (plan, step)
        return plan

    def submit(self, plan: StepPlan) -> None:
        self._check_idle("submit")
        assert self._planned is not None, "submit without a plan; plan first, and submit each plan once"
        assert plan == self._planned[0], "only the newest plan can be submitted"
        _, step = self._planned
        self._planned = None
        self._num_steps += 1
        flight = self._in_flight = _InFlight(plan=plan, entries=step.entries, started_s=time.perf_counter())
        for sequence in step.displaced:
            self._leave_slot(sequence, keep_cache=True)
        for sequence in step.evicted:
            self._leave_slot(sequence, keep_cache=False)
        for entry in step.entries:
            entry.sequence.slot_idx = entry.slot_idx
            if entry.sequence.cached_prompt_tokens is None:
                entry.sequence.cached_prompt_tokens = min(entry.start, len(entry.sequence.request.prompt_token_ids))
        if not step.entries:
            return
        flight.scheduled = self._scheduler.schedule_planned(
            [(entry.sequence, entry.start, entry.num_tokens) for entry in step.entries]
        )
        try:
            flight.forward = self._core.model_executor.execute_model(flight.scheduled, non_block=True)
            flight.sampled = self._core.model_executor.sample_tokens(None, non_block=True)
        except Exception as error:
            flight.error = repr(error)

    def collect(self) -> StepResult:
        self._check_open()
        flight, self._in_flight = self._in_flight, None
        assert flight is not None or self._ended or self._aborted, "collect without a submitted step"
        tokens: tuple[SampledToken, ...] = ()
        device_s = 0.0
        if flight is None:
            self._forget_plan()
        elif flight.scheduled is not None:
            tokens = self._finish(flight)
            device_s = time.perf_counter() - flight.started_s
        self._end_aborted()
        if self._not_finite and self._closed is None:
            self._clear_cache()
        completions, self._ended = tuple(self._ended), []
        step_id = self._num_steps if flight is None else flight.plan.step_id
        return StepResult(step_id=step_id, tokens=tokens, completions=completions, device_s=device_s)

    def drain(self) -> StepResult | None:
        self._check_open()
        return self.collect() if self._in_flight is not None or self._ended or self._aborted else None

    def commit(self, weights: StagedUpdate | RankUpdate, *, version: int) -> None:
        for _ in self.commit_in_slices(weights, version=version):
            pass

    def commit_in_slices(
        self, weights: StagedUpdate | RankUpdate, *, version: int, max_slice_bytes: int = MAX_SLICE_BYTES, path: str | None = None
    ) -> Iterator[None]:
        """Commit piece by piece: between two pieces other engines may use the device, this one may not.

        Takes effect when the iterator is exhausted. If it raises, or is closed before, the old weights and version are whole.

        Args:
            path: where `weights` lies as a file already, if it does.
        """
        self._check_idle("commit")
        self._forget_plan()
        self._committing = True
        try:
            if isinstance(weights, RankUpdate):
                yield from self.weights.commit_staged(weights, max_slice_bytes)
            else:
                yield from self.weights.apply(weights, max_slice_bytes, path)
        finally:
            self._committing = False
        self._version = version
        self._epoch += 1
        self._treat_stale_cache()

    def park(self) -> Iterator[None]:
        """Give up the cache and move weights in host memory to a file (common.serving.parking); those on a GPU stay where they are.

        Call after `drain`, while no request is live; activate before the next step.

        Raises:
            OSError: the file cannot hold them; all weights are right.
        """
        self._check_idle("park")
        if self._live:
            raise ValueError(f"park: {len(self._live)} requests are live; let them end or abort them first")
        self._forget_plan()
        self._drop_prefixes()
        yield from self._move("park")

    def activate(self) -> Iterator[None]:
        """The inverse of `park`: weights are in memory again, the cache is empty."""
        self._check_idle("activate")
        yield from self._move("activate")

    def _move(self, work: str) -> Iterator[None]:
        self._moving = True
        try:
            while True:
                answers = self._core.collective_rpc("move_piece", args=(work,))
                failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
                if failures:
                    expected = all(text.startswith("OSError") for text in failures.values())
                    raise (OSError if expected else RuntimeError)(f"{work} failed on workers: {failures}")
                if not any(moved for moved, _ in answers):
                    return
                yield
        finally:
            self._moving = False

    def call_workers(self, method: str | Callable[..., object], *args: object, **kwargs: object) -> list[Any]:
        """What a method of every worker, or a function of it, returns: for what the contract leaves out, such as profiling."""
        self._check_idle("call_workers")
        return self._core.collective_rpc(method, args=args, kwargs=kwargs)

    def stop(self, request_id: str, *, error: str | None = None) -> Completion:
        """End a request now, between two steps, for a reason that its owner has found: a stop string, or an error."""
        self._check_idle("stop")
        self._forget_plan()
        self._end(self._live[request_id], FinishReason.STOP if error is None else FinishReason.ERROR, error=error)
        return self._ended.pop()

    def close(self) -> None:
        if not self._released:  # a failed engine is closed to requests, and still holds the device
            self._released = True
            self._closed = "was closed; make a new one"
            self._ended.clear()
            self._live.clear()
            self._by_internal.clear()
            shut_down(self._core)
            remove_shared_memory(self.shared_memory)

    def _treat_stale_cache(self) -> None:
        policy = self.options.stale_cache
        if policy is StaleCache.KEEP:
            return
        for sequence in list(self._live.values()):
            holds_cache = self._scheduler.held(sequence) is not None
            if policy is StaleCache.DROP and holds_cache:
                self._leave_slot(sequence, keep_cache=False)
            elif policy is StaleCache.TAG and not holds_cache:
                self._scheduler.give_up_cache(sequence, cache_salt=self._salt(sequence.request))
        if policy is StaleCache.DROP:
            self._drop_prefixes()

    def _drop_prefixes(self) -> None:
        dropped = self._scheduler.reset_prefix_cache()  # does nothing, without raising, while any block is in use
        assert dropped, "blocks are still in use after every request gave up its cache"

    def _clear_cache(self) -> None:
        """Zero all keys and values; requests that go on are computed again. What is not finite would stay in blocks after their
        requests have ended, and reach others: attention multiplies by 0 what it masks, and 0 times NaN is NaN."""
        self._not_finite = False
        for sequence in self._live.values():
            if self._scheduler.held(sequence) is not None:
                self._leave_slot(sequence, keep_cache=False)
        self._drop_prefixes()
        self._core.collective_rpc("zero_cache")

    def _salt(self, request: Request) -> str:
        """With whom a request may share prefixes from now on: its own namespace and, under TAG, what began after this commit."""
        epoch = self._epoch if self.options.stale_cache is StaleCache.TAG else 0
        return f"{epoch} {request.cache_namespace}"

    def _vllm_request(self, sequence: planner.Sequence) -> Any:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request as VllmRequest

        from rose_gpu.vllm.sampler import SEED_ARGUMENT, key_seed

        params = sequence.request.sampling
        return VllmRequest(
            request_id=sequence.internal_id,
            prompt_token_ids=list(sequence.request.prompt_token_ids),  # vLLM keeps the list it is given
            sampling_params=SamplingParams(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k or 0,
                min_p=params.min_p,
                stop_token_ids=list(params.stop_token_ids),
                logprobs=params.num_top_logprobs,
                detokenize=False,
                extra_args={SEED_ARGUMENT: key_seed(sequence.request.key)},
            ),
            pooling_params=None,
            arrival_time=float(sequence.arrival),
            cache_salt=self._salt(sequence.request),
            block_hasher=self._core.request_block_hasher,
        )

    def _finish(self, flight: _InFlight) -> tuple[SampledToken, ...]:
        """Wait for the step's outputs and hand them to their sequences."""
        try:
            if flight.error is not None:
                raise RuntimeError(flight.error)
            flight.forward.result()  # what kept workers from sampling is raised here; some ranks' samplers then return nothing
            sampled = flight.sampled.result()
            outputs = self._scheduler.update_from_output(flight.scheduled, sampled)
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}{describe_ended_workers(self._core)}")
            return ()
        tokens = []
        for output in (output for client in outputs.values() for output in client.outputs):
            sequence = self._by_internal.get(output.request_id)
            if sequence is None or sequence.aborted:
                continue
            token = self._take(sequence, output)
            if token is not None:
                tokens.append(token)
        return tuple(tokens)

    def _take(self, sequence: planner.Sequence, output: Any) -> SampledToken | None:
        """Record a sequence's new token and end it if it is done."""
        if not output.new_token_ids:
            return None
        (token_id,) = output.new_token_ids
        num_top = sequence.request.sampling.num_top_logprobs
        values, ids = np.asarray(output.new_logprobs.logprobs)[0], np.asarray(output.new_logprobs.logprob_token_ids)[0]
        logprob = float(values[0])
        request_id = sequence.request.request_id
        if not math.isfinite(logprob):
            self._not_finite = True
            problem = f"request {request_id}: the logits are not finite under weight version {self._version}"
            self._end(sequence, FinishReason.ERROR, error=problem)
            return None
        sequence.token_ids.append(token_id)
        sequence.logprobs.append(logprob)
        sequence.versions.append(self._version)
        top = tuple(zip(ids[1 : 1 + num_top].tolist(), values[1 : 1 + num_top].tolist(), strict=True))
        if top:
            sequence.top_logprobs.append(top)
        finish_reason = None if output.finish_reason is None else FINISH_REASONS[str(output.finish_reason)]
        looks_for_strings = sequence.request.sampling.stop_strings and finish_reason is not FinishReason.STOP
        if not (looks_for_strings and self._end_at_stop_string(sequence)) and finish_reason is not None:
            self._end(sequence, finish_reason)
        return SampledToken(
            request_id=request_id,
            token_id=token_id,
            behavior_logprob=logprob,
            weight_version=self._version,
            top_logprobs=top,
        )

    def _end_at_stop_string(self, sequence: planner.Sequence) -> bool:
        """Whether the newest token ended the sequence; the last one allowed may do so too."""
        assert self._decode is not None
        try:
            stops = completes_stop_string(sequence.token_ids, sequence.request.sampling.stop_strings, self._decode)
        except Exception as error:  # the caller's function: its failure is this request's alone
            self._end(sequence, FinishReason.ERROR, error=f"decoding the tokens to look for stop strings failed: {error!r}")
            return True
        if stops:
            self._end(sequence, FinishReason.STOP)
        return stops

    def _leave_slot(self, sequence: planner.Sequence, *, keep_cache: bool) -> None:
        sequence.preempted = sequence.preempted or sequence.slot_idx is not None
        sequence.slot_idx = None
        if not keep_cache:
            self._scheduler.give_up_cache(sequence, cache_salt=self._salt(sequence.request))

    def _end(self, sequence: planner.Sequence, reason: FinishReason, *, error: str | None = None) -> None:
        self._core.abort_requests([sequence.internal_id])  # frees its blocks; changes nothing if vLLM has ended it itself
        del self._live[sequence.request.request_id], self._by_internal[sequence.internal_id]
        self._ended.append(
            Completion(
                request_id=sequence.request.request_id,
                token_ids=tuple(sequence.token_ids),
                behavior_logprobs=tuple(sequence.logprobs),
                weight_versions=tuple(sequence.versions),
                finish_reason=reason,
                cached_prompt_tokens=sequence.cached_prompt_tokens or 0,
                top_logprobs=tuple(sequence.top_logprobs),
                error=error,
            )
        )

    def _end_aborted(self) -> None:
        aborted, self._aborted = self._aborted, []
        for sequence in aborted:
            if sequence.internal_id in self._by_internal:
                self._end(sequence, FinishReason.ABORTED)

    def _forget_plan(self) -> None:
        self._planned = None
        self._end_aborted()

    def _fail(self, error: str) -> None:
        """The workers failed: what they hold is unknown. Every request ends with the error."""
        for sequence in list(self._live.values()):
            self._end(sequence, FinishReason.ERROR, error=f"request {sequence.request.request_id}: the workers failed: {error}")
        self._closed = f"failed ({error}); make a new one"

    def _check_open(self) -> None:
        if self._closed is not None and not self._ended:
            raise EngineClosedError(f"engine {self._info.name!r} {self._closed}")

    def _check_idle(self, action: str) -> None:
        self._check_open()
        assert self._in_flight is None, f"{action} with a step in flight; collect or drain first"
        assert not self._committing, f"{action} in the middle of a commit; exhaust or close its iterator first"
        assert not self._moving, f"{action} in the middle of parking or activating; exhaust or close its iterator first"
