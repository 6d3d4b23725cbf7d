"""EmulatedEngine: a StepEngine that only counts. It takes the time a real one was measured to take and computes nothing.

For simulations of hours of traffic in seconds: slots, budgets, chunked prefill, prefixes kept between the turns of a trajectory,
and step durations are real; tokens are zeros. A prefix is what the last request with the same trajectory id and a cache namespace
left. FakeEngine is the one whose tokens and caches mean something. It has no priorities and no limit on cache memory. Invariant:
the clock it is given moves by the duration of each step, and by nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Protocol

from common.clock import Clock
from common.errors import RequestRejectedError
from common.serving.engine import (
    DecodeEntry,
    EngineInfo,
    EngineLoad,
    PrefillChunk,
    SampledToken,
    StepLimits,
    StepPlan,
    StepResult,
)
from common.types import Completion, FinishReason, Request

Duration = Callable[[StepPlan], float]
"""True seconds of a step, noise included."""


class MovableClock(Clock, Protocol):
    """FakeClock, or one that sleeps."""

    def advance(self, seconds: float) -> None: ...


@dataclasses.dataclass(kw_only=True, eq=False, slots=True)
class _Sequence:
    request: Request
    num_cached: int = 0
    num_generated: int = 0
    slot_idx: int | None = None

    @property
    def num_context(self) -> int:
        return len(self.request.prompt_token_ids) + self.num_generated


class EmulatedEngine:
    """See the module and common.serving.engine.StepEngine. `commit` takes anything.

    Args:
        block_tokens: prefixes are kept in whole blocks.
    """

    def __init__(
        self,
        duration_of: Duration,
        clock: MovableClock,
        *,
        max_slots: int,
        max_context_tokens: int = 1 << 20,
        block_tokens: int = 1,
        vocab_size: int = 1,
        name: str = "emulated",
    ) -> None:
        self._info = EngineInfo(name=name, vocab_size=vocab_size, max_slots=max_slots, max_context_tokens=max_context_tokens)
        self._duration_of, self._clock, self._block_tokens = duration_of, clock, block_tokens
        self._waiting: dict[str, _Sequence] = {}
        self._running: dict[str, _Sequence] = {}
        self._free_slots = list(range(max_slots))
        self._prefixes: dict[tuple[str, int], int] = {}
        self._ended: list[Completion] = []
        self._in_flight: StepPlan | None = None
        self._num_steps = itertools.count()
        self._version = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=len(self._running),
            waiting_requests=len(self._waiting),
            used_cache_tokens=sum(sequence.num_cached for sequence in self._running.values()),
            capacity_cache_tokens=self._info.max_slots * self._info.max_context_tokens,
            weight_version=self._version,
        )

    def add(self, request: Request) -> None:
        num_tokens = len(request.prompt_token_ids) + request.sampling.max_tokens
        if num_tokens > self._info.max_context_tokens:
            raise RequestRejectedError(f"request {request.request_id}: {num_tokens} tokens exceed {self._info.max_context_tokens}")
        self._waiting[request.request_id] = _Sequence(request=request)

    def abort(self, request_id: str) -> None:
        assert self._in_flight is None, "this engine's steps are over when submit's caller goes on"
        sequence = self._waiting.get(request_id) or self._running.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.ABORTED)

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._leave_slot(sequence)
            sequence.num_cached *= keep_cache
            self._waiting = {request_id: sequence, **self._waiting}

    def plan(self, limits: StepLimits) -> StepPlan | None:
        assert self._in_flight is None, "plan with a step in flight"
        budget, prefill, decode = limits.max_tokens, [], []
        free, slots = len(self._free_slots), reversed(self._free_slots)
        waiting = sorted(self._waiting.values(), key=lambda sequence: -sequence.request.priority)
        line = [*self._running.values(), *itertools.islice(waiting, free)]
        for sequence in sorted(line, key=lambda sequence: (-sequence.request.priority, not _decodes(sequence))):
            if budget == 0:
                break
            num_cached = sequence.num_cached or self._prefix(sequence)
            slot_idx = next(slots) if sequence.slot_idx is None else sequence.slot_idx
            request_id, num_tokens = sequence.request.request_id, min(sequence.num_context - num_cached, budget)
            budget -= num_tokens
            if _decodes(sequence):
                decode.append(DecodeEntry(request_id=request_id, slot_idx=slot_idx, context_tokens=num_cached))
            else:
                prefill.append(PrefillChunk(request_id=request_id, slot_idx=slot_idx, start=num_cached, num_tokens=num_tokens))
        if not prefill and not decode and not self._ended:
            return None
        return StepPlan(step_id=next(self._num_steps), prefill=tuple(prefill), decode=tuple(decode))

    def submit(self, plan: StepPlan) -> None:
        assert self._in_flight is None, "submit with a step in flight"
        self._in_flight = plan

    def collect(self) -> StepResult:
        plan, self._in_flight = self._in_flight, None
        assert plan is not None or self._ended, "collect without a submitted step"
        duration_s = self._duration_of(plan) if plan is not None and plan.num_tokens else 0.0
        self._clock.advance(duration_s)
        tokens = [] if plan is None else [token for chunk in plan.prefill for token in self._compute(chunk, chunk.num_tokens)]
        tokens += [] if plan is None else [token for entry in plan.decode for token in self._compute(entry, 1)]
        completions, self._ended = tuple(self._ended), []
        step_id = -1 if plan is None else plan.step_id
        return StepResult(step_id=step_id, tokens=tuple(tokens), completions=completions, device_s=duration_s)

    def drain(self) -> StepResult | None:
        return self.collect() if self._in_flight is not None or self._ended else None

    def commit(self, weights: object, *, version: int) -> None:
        assert self._in_flight is None, "commit with a step in flight; drain first"
        self._version = version

    def close(self) -> None:
        self._running.clear()
        self._waiting.clear()

    def _prefix(self, sequence: _Sequence) -> int:
        kept = min(self._prefixes.get(_owner(sequence.request), 0), sequence.num_context - 1)
        return kept - kept % self._block_tokens

    def _compute(self, entry: PrefillChunk | DecodeEntry, num_tokens: int) -> list[SampledToken]:
        sequence = self._running.get(entry.request_id)
        if sequence is None:
            sequence = self._waiting.pop(entry.request_id)
            sequence.slot_idx = self._free_slots.pop()
            self._running[entry.request_id] = sequence
        start = entry.start if isinstance(entry, PrefillChunk) else entry.context_tokens
        sequence.num_cached = start + num_tokens
        if sequence.num_cached < sequence.num_context:
            return []
        sequence.num_generated += 1
        if sequence.num_generated == sequence.request.sampling.max_tokens:
            self._end(sequence, FinishReason.LENGTH)
        return [SampledToken(request_id=entry.request_id, token_id=0, behavior_logprob=0.0, weight_version=self._version)]

    def _leave_slot(self, sequence: _Sequence) -> None:
        if sequence.slot_idx is not None:
            self._free_slots.append(sequence.slot_idx)
            sequence.slot_idx = None

    def _end(self, sequence: _Sequence, reason: FinishReason) -> None:
        request = sequence.request
        self._waiting.pop(request.request_id, None)
        self._running.pop(request.request_id, None)
        self._leave_slot(sequence)
        if request.cache_namespace:
            self._prefixes[_owner(request)] = sequence.num_cached
        num_tokens = sequence.num_generated
        self._ended.append(
            Completion(
                request_id=request.request_id,
                token_ids=(0,) * num_tokens,
                behavior_logprobs=(0.0,) * num_tokens,
                weight_versions=(self._version,) * num_tokens,
                finish_reason=reason,
            )
        )


def _owner(request: Request) -> tuple[str, int]:
    return request.cache_namespace, request.key.trajectory_id


def _decodes(sequence: _Sequence) -> bool:
    return sequence.num_generated > 0 and sequence.num_context - sequence.num_cached == 1
