"""FakeEngine: a whole StepEngine without an accelerator, for tests and simulations of everything that drives one.

Continuous batching over slots, prefill in chunks under StepLimits, priorities that displace, preemption with or without the
cache, a bounded cache, reuse of prefixes, aborts and weight versions are real; the model is a small numpy table (fake_model.py)
and time is a formula (StepTiming) that moves a FakeClock. It has no thread and never sleeps. Stricter than the contract asks: an
assertion fails when it is planned, preempted or committed with a step in flight, so that a driver which relies on luck is found.
Invariant: the state after `submit(plan)` follows from the calls before it and the plan alone, never from a clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from common.clock import FakeClock
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
from common.serving.fake_model import EMPTY_CONTEXT, FakeWeights, check_weights, extend_context
from common.serving.fake_prefix import PrefixStore
from common.serving.fake_request import LiveRequest
from common.serving.rejection import why_never
from common.types import Completion, FinishReason, Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTiming:
    """How long a step takes on the pretended device. The defaults were measured on one CPU core with a model of 6M parameters."""

    fixed_s: float = 5.5e-3
    prefill_token_s: float = 0.14e-3
    decode_sequence_s: float = 0.15e-3
    context_token_s: float = 0.7e-6

    def duration_s(self, plan: StepPlan) -> float:
        if plan.num_tokens == 0:
            return 0.0
        return (
            self.fixed_s
            + self.prefill_token_s * plan.prefill_tokens
            + self.decode_sequence_s * len(plan.decode)
            + self.context_token_s * plan.decode_context_tokens
        )


class FakeEngine:
    """See common.serving.engine.StepEngine and the module.

    Args:
        cache_capacity_tokens: what all caches together may hold; default: every slot full. When a step needs room, caches of
            requests outside the step are given up, last in line first.
        prefix_reuse: keep the caches of ended requests, as far as there is room, for prompts that begin alike.
        stale_cache: what a commit does to caches (the numbers do not depend on it here: this cache holds no weights).
        clock: moved by each step's duration; None: no time passes, only `device_s` reports it.
        asynchronous: `submit` returns at once and the step is carried out in `collect`; otherwise `submit` does the work.
    """

    def __init__(
        self,
        weights: FakeWeights,
        *,
        version: int = 0,
        max_slots: int = 8,
        max_context_tokens: int = 256,
        cache_capacity_tokens: int | None = None,
        prefix_reuse: bool = False,
        stale_cache: StaleCache = StaleCache.KEEP,
        timing: StepTiming | None = None,
        clock: FakeClock | None = None,
        asynchronous: bool = False,
        name: str = "fake",
    ) -> None:
        if max_slots < 1 or max_context_tokens < 2:
            raise ValueError(f"max_slots={max_slots} must be at least 1 and max_context_tokens={max_context_tokens} at least 2")
        self._capacity = max_slots * max_context_tokens if cache_capacity_tokens is None else cache_capacity_tokens
        if self._capacity < max_context_tokens:
            raise ValueError(
                f"cache_capacity_tokens={self._capacity} cannot hold one request of max_context_tokens={max_context_tokens}; "
                "raise the first or lower the second"
            )
        check_weights(weights, weights)
        self._info = EngineInfo(
            name=name, vocab_size=weights["bias"].shape[0], max_slots=max_slots, max_context_tokens=max_context_tokens
        )
        self._weights = {name: value.copy() for name, value in weights.items()}
        self._version = version
        self._prefixes = PrefixStore()
        self._prefix_reuse = prefix_reuse
        self._stale_cache = stale_cache
        self._timing = timing or StepTiming()
        self._clock = clock
        self._asynchronous = asynchronous
        self._slots: list[list[int]] = [[] for _ in range(max_slots)]
        self._live: dict[str, LiveRequest] = {}
        self._ended: list[Completion] = []
        self._num_added = 0
        self._num_steps = 0
        self._in_flight: StepPlan | None = None
        self._ready_at_s = 0.0
        self._result: StepResult | None = None
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    def load(self) -> EngineLoad:
        running = sum(live.slot_idx is not None for live in self._live.values())
        return EngineLoad(
            running_requests=running,
            waiting_requests=len(self._live) - running,
            used_cache_tokens=sum(len(self._cache(live)) for live in self._live.values()),
            capacity_cache_tokens=self._capacity,
            weight_version=self._version,
            reclaimable_cache_tokens=self._prefixes.num_tokens,
        )

    def add(self, request: Request) -> None:
        self._check_open()
        in_use = request.request_id in self._live
        problem = "the id is in use; ids must be unique" if in_use else why_never(request, self._info)
        if problem is not None:
            raise RequestRejectedError(f"request {request.request_id}: {problem}")
        self._live[request.request_id] = LiveRequest(request=request, arrival=self._num_added)
        self._num_added += 1

    def abort(self, request_id: str) -> None:
        self._check_open()
        live = self._live.get(request_id)
        if live is None:
            return
        if self._in_flight is None or self._result is not None:
            self._end(live, FinishReason.ABORTED)
        else:
            live.aborted = (
                True  # the step in flight may still name it: ended, without that step's token, when the step is carried out
            )

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        self._check_open()
        assert self._in_flight is None, "preempt with a step in flight; collect or drain first"
        live = self._live.get(request_id)
        if live is not None and live.slot_idx is not None:
            self._leave_slot(live, keep_cache=keep_cache)
            live.preempted = True

    def plan(self, limits: StepLimits) -> StepPlan | None:
        self._check_open()
        assert self._in_flight is None, "plan with a step in flight; collect or drain first"
        if limits.max_tokens < 1:
            raise ValueError(f"StepLimits.max_tokens={limits.max_tokens}: a step needs room for at least 1 token")
        budget, cache_room = limits.max_tokens, self._capacity
        prefill: list[PrefillChunk] = []
        decode: list[DecodeEntry] = []
        taken: dict[int, LiveRequest] = {}
        in_line = self._in_line()
        for live in in_line:
            num_cached, num_context = self._num_cached(live), len(live.context_ids)
            num_tokens = min(num_context - num_cached, budget, cache_room - num_cached)
            slot_idx = self._slot_for(live, in_line, taken) if num_tokens > 0 else None
            if slot_idx is None:
                continue
            taken[slot_idx] = live
            budget -= num_tokens
            cache_room -= num_cached + num_tokens
            request_id = live.request.request_id
            if live.token_ids and num_context - num_cached == 1:
                decode.append(DecodeEntry(request_id=request_id, slot_idx=slot_idx, context_tokens=num_cached))
            else:
                prefill.append(PrefillChunk(request_id=request_id, slot_idx=slot_idx, start=num_cached, num_tokens=num_tokens))
        if not taken and not self._ended:
            return None
        return StepPlan(step_id=self._num_steps, prefill=tuple(prefill), decode=tuple(decode))

    def submit(self, plan: StepPlan) -> None:
        self._check_open()
        assert self._in_flight is None, f"submit of step {plan.step_id} with step {self._num_steps - 1} in flight"
        assert plan.step_id == self._num_steps, f"submit of step {plan.step_id}, the newest plan is {self._num_steps}"
        self._num_steps += 1
        self._place(plan)
        self._in_flight = plan
        if self._clock is not None:
            self._ready_at_s = self._clock.now_s() + self._timing.duration_s(plan)
        if not self._asynchronous:
            self._result = self._carry_out(plan)

    def collect(self) -> StepResult:
        self._check_open()
        assert self._in_flight is not None or self._ended, "collect without a submitted step"
        if self._in_flight is None:
            return StepResult(step_id=self._num_steps, tokens=(), completions=self._take_ended(), device_s=0.0)
        result = self._result or self._carry_out(self._in_flight)
        self._in_flight = self._result = None
        return result

    def drain(self) -> StepResult | None:
        self._check_open()
        return self.collect() if self._in_flight is not None or self._ended else None

    def commit(self, weights: FakeWeights, *, version: int) -> None:
        self._check_open()
        assert self._in_flight is None, "commit with a step in flight; drain first"
        check_weights(weights, self._weights)
        self._weights = {name: value.copy() for name, value in weights.items()}
        self._version = version
        if self._stale_cache is StaleCache.KEEP:
            return
        self._prefixes.clear()
        for live in self._live.values():
            if self._stale_cache is StaleCache.DROP:
                live.preempted = live.preempted or live.slot_idx is not None
                self._leave_slot(live, keep_cache=False)
            live.stale = bool(self._cache(live))

    def close(self) -> None:
        self._closed = True
        self._live.clear()
        self._slots = []

    def state_digest(self) -> str:
        """A hash of everything that decides what happens next: equal on two engines that ran the same calls and plans."""
        weights = [hashlib.sha256(value.tobytes()).hexdigest() for value in self._weights.values()]
        requests = [live.digest_fields() for live in self._live.values()]
        ended = [dataclasses.asdict(completion) for completion in self._ended]
        counters = [self._version, self._num_added, self._num_steps, self._in_flight is not None]
        state = [weights, counters, requests, ended, self._slots, self._prefixes.num_tokens]
        return hashlib.sha256(json.dumps(state).encode()).hexdigest()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"engine {self._info.name!r} was closed; make a new one")

    def _cache(self, live: LiveRequest) -> list[int]:
        return live.kept_cache if live.slot_idx is None else self._slots[live.slot_idx]

    def _num_cached(self, live: LiveRequest) -> int:
        """Tokens that its next step need not compute: its own cache, or for a request without one the prefix that is held."""
        num_cached = len(self._cache(live))
        if num_cached or live.slot_idx is not None or not self._prefix_reuse:
            return num_cached
        return self._prefixes.match(live.request.cache_namespace, extend_context(EMPTY_CONTEXT, live.context_ids[:-1]))

    def _decodes_next(self, live: LiveRequest) -> bool:
        return bool(live.token_ids) and len(live.context_ids) - len(self._cache(live)) == 1

    def _in_line(self) -> list[LiveRequest]:
        """Whom a step serves first: by priority; among equals decoding ones, then running, then preempted, then by arrival."""

        def place(live: LiveRequest) -> tuple[int, bool, bool, bool, int]:
            waits = live.slot_idx is None
            return (-live.request.priority, waits or not self._decodes_next(live), waits, not live.preempted, live.arrival)

        return sorted(self._live.values(), key=place)

    def _slot_for(self, live: LiveRequest, in_line: list[LiveRequest], taken: dict[int, LiveRequest]) -> int | None:
        """Its own slot (unless this plan has given it away), a free one, or that of the last in line with a lower priority."""
        if live.slot_idx is not None:
            return None if live.slot_idx in taken else live.slot_idx
        occupied = {other.slot_idx for other in in_line}
        for slot_idx in range(self._info.max_slots):
            if slot_idx not in occupied and slot_idx not in taken:
                return slot_idx
        for other in reversed(in_line):
            if other.request.priority >= live.request.priority:
                return None
            if other.slot_idx is not None and other.slot_idx not in taken:
                return other.slot_idx
        return None

    def _place(self, plan: StepPlan) -> None:
        """Bring the slots and caches into the state the plan assumes: displace, move in, and make room in the cache."""
        entries = _entries(plan)
        in_step = {entry.request_id for entry in entries}
        holders = {live.slot_idx: live for live in self._live.values() if live.slot_idx is not None}
        for entry in entries:
            live, holder = self._live[entry.request_id], holders.get(entry.slot_idx)
            if holder is live:
                continue
            if holder is not None:
                self._leave_slot(holder, keep_cache=True)
                holder.preempted = True
            assert live.slot_idx is None, f"plan moves running request {entry.request_id} to slot {entry.slot_idx}"
            self._move_in(live, entry)
        excess = sum(len(self._cache(live)) for live in self._live.values()) + plan.num_tokens - self._capacity
        excess += self._prefixes.num_tokens
        excess -= self._prefixes.give_up(excess)
        for live in reversed(self._in_line()):
            if excess <= 0:
                break
            if live.request.request_id not in in_step:
                excess -= len(self._cache(live))
                live.preempted = live.preempted or live.slot_idx is not None
                self._leave_slot(live, keep_cache=False)
        assert excess <= 0, f"step {plan.step_id} needs {excess} cache tokens more than there are"

    def _move_in(self, live: LiveRequest, entry: PrefillChunk | DecodeEntry) -> None:
        """Take the entry's slot with the cache that was kept, or with a prefix that others left."""
        num_cached = entry.start if isinstance(entry, PrefillChunk) else entry.context_tokens
        if num_cached and not live.kept_cache:
            live.kept_cache = extend_context(EMPTY_CONTEXT, live.context_ids[:num_cached])
            self._prefixes.put(live.request.cache_namespace, live.kept_cache)
        if live.cached_prompt_tokens is None:
            live.cached_prompt_tokens = min(num_cached, len(live.request.prompt_token_ids))
        live.slot_idx, self._slots[entry.slot_idx], live.kept_cache = entry.slot_idx, live.kept_cache, []

    def _leave_slot(self, live: LiveRequest, *, keep_cache: bool) -> None:
        cache = self._cache(live)
        if live.slot_idx is not None:
            self._slots[live.slot_idx] = []
            live.slot_idx = None
        live.kept_cache = cache if keep_cache else []

    def _carry_out(self, plan: StepPlan) -> StepResult:
        if self._clock is not None:
            self._clock.advance(max(0.0, self._ready_at_s - self._clock.now_s()))
        tokens: list[SampledToken] = []
        for entry in _entries(plan):
            live = self._live[entry.request_id]
            if live.aborted:
                continue
            token = self._forward(live, entry)
            if token is not None:
                tokens.append(token)
        for live in [live for live in self._live.values() if live.aborted]:
            self._end(live, FinishReason.ABORTED)
        duration_s = self._timing.duration_s(plan)
        return StepResult(step_id=plan.step_id, tokens=tuple(tokens), completions=self._take_ended(), device_s=duration_s)

    def _forward(self, live: LiveRequest, entry: PrefillChunk | DecodeEntry) -> SampledToken | None:
        """Extend the cache by the entry's tokens; when it then holds the whole context, sample the next token."""
        start, num_tokens = (entry.start, entry.num_tokens) if isinstance(entry, PrefillChunk) else (entry.context_tokens, 1)
        cache, context = self._slots[entry.slot_idx], live.context_ids
        assert live.slot_idx == entry.slot_idx, f"{entry}: the request is in slot {live.slot_idx}"
        assert len(cache) == start, f"{entry}: its cache holds {len(cache)} tokens"
        cache.extend(extend_context(cache[-1] if cache else EMPTY_CONTEXT, context[start : start + num_tokens]))
        if len(cache) < len(context):
            return None
        token = live.sample(self._weights, self._version, cache[-1])
        reason = live.finish_reason()
        if reason is not None:
            self._end(live, reason)
        return token

    def _end(self, live: LiveRequest, reason: FinishReason) -> None:
        if self._prefix_reuse and not live.stale:
            self._prefixes.put(live.request.cache_namespace, self._cache(live))
        self._leave_slot(live, keep_cache=False)
        del self._live[live.request.request_id]
        self._ended.append(live.completion(reason))

    def _take_ended(self) -> tuple[Completion, ...]:
        ended, self._ended = tuple(self._ended), []
        return ended


def _entries(plan: StepPlan) -> list[PrefillChunk | DecodeEntry]:
    return [*plan.prefill, *plan.decode]
