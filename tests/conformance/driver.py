"""Drives an engine as its contract asks and checks, at every step, what must always hold.

The laws checked here: a plan keeps its limit, survives serialisation, names live requests in distinct slots; every token carries
the version the engine has; a request ends once, and its completion is exactly the tokens that were streamed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from common.serving.engine import SampledToken, StepEngine, StepLimits, StepPlan, StepResult
from common.serving.wire import decode_plan, encode_plan
from common.types import Completion, FinishReason, Request, SamplingKey, SamplingParams

STEP_TOKENS = 256
"""A limit that no test's work reaches."""
MAX_STEPS = 5_000


def make_request(
    request_id: str,
    prompt_token_ids: tuple[int, ...],
    *,
    trajectory_id: int = 0,
    turn_idx: int = 0,
    run_seed: int = 7,
    priority: int = 0,
    max_tokens: int = 8,
    temperature: float = 1.0,
    **sampling: Any,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling),
        key=SamplingKey(run_seed=run_seed, trajectory_id=trajectory_id, turn_idx=turn_idx),
        priority=priority,
    )


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt of tokens 1..19 that differs with `salt`."""
    return tuple(1 + (7 * position + 11 * salt + position * position * (salt + 3)) % 19 for position in range(length))


def plain(plan: StepPlan) -> StepPlan:
    """The plan without what an engine adds for its own ranks."""
    return StepPlan(step_id=plan.step_id, prefill=plan.prefill, decode=plan.decode)


class Driver:
    """One engine and everything it has said so far."""

    def __init__(self, engine: StepEngine[Any]) -> None:
        self.engine = engine
        self.live: dict[str, Request] = {}
        self.streamed: dict[str, list[SampledToken]] = {}
        self.completions: dict[str, Completion] = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            self.live[request.request_id] = request
            self.streamed[request.request_id] = []
            self.completions.pop(request.request_id, None)

    def submit(self, max_tokens: int = STEP_TOKENS) -> StepPlan | None:
        """Plan and start a step; None when the engine has nothing to do."""
        plan = self.engine.plan(StepLimits(max_tokens=max_tokens))
        if plan is None:
            return None
        assert plan.num_tokens <= max_tokens, f"{plan} exceeds the limit of {max_tokens} tokens"
        assert decode_plan(encode_plan(plain(plan))) == plain(plan)
        entries = [*plan.prefill, *plan.decode]
        assert {entry.request_id for entry in entries} <= set(self.live)
        assert len({entry.slot_idx for entry in entries}) == len(entries) == len({entry.request_id for entry in entries})
        assert all(0 <= entry.slot_idx < self.engine.info.max_slots for entry in entries)
        assert all(chunk.num_tokens > 0 for chunk in plan.prefill)
        self.plans.append(plan)
        self.engine.submit(plan)
        return plan

    def collect(self) -> StepResult:
        result = self.engine.collect()
        assert result.step_id == self.plans[-1].step_id
        return self._record(result)

    def drain(self) -> StepResult | None:
        result = self.engine.drain()
        return None if result is None else self._record(result)

    def step(self, max_tokens: int = STEP_TOKENS) -> StepResult | None:
        """One whole step; with nothing to plan, what a drain brings."""
        return self.drain() if self.submit(max_tokens) is None else self.collect()

    def run(self, max_tokens: int = STEP_TOKENS) -> dict[str, Completion]:
        """Step until every request has ended."""
        for _ in range(MAX_STEPS):
            if not self.live:
                break
            self.step(max_tokens)
        assert not self.live, f"{sorted(self.live)} have not ended after {MAX_STEPS} steps: {self.engine.load()}"
        assert self.step(max_tokens) is None, "an engine without requests still brings results"
        load = self.engine.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0), load
        return self.completions

    def run_alone(self, request: Request, request_id: str = "alone") -> Completion:
        """What `request` gives with nothing else in the engine."""
        assert not self.live
        self.add(dataclasses.replace(request, request_id=request_id))
        return dataclasses.replace(self.run()[request_id], request_id=request.request_id)

    def step_until_tokens(self, request_id: str, num_tokens: int) -> None:
        """Step until the request has streamed `num_tokens` tokens and goes on."""
        while len(self.streamed[request_id]) < num_tokens:
            assert request_id in self.live
            self.step()
        assert request_id in self.live

    def _record(self, result: StepResult) -> StepResult:
        assert result.device_s >= 0.0
        version = self.engine.load().weight_version
        for token in result.tokens:
            assert token.request_id in self.live, f"{token} of a request that has ended"
            assert token.weight_version == version
            assert 0 <= token.token_id < self.engine.info.vocab_size
            assert token.behavior_logprob <= 0.0
            self.streamed[token.request_id].append(token)
        for completion in result.completions:
            self._check_end(completion)
        return result

    def _check_end(self, completion: Completion) -> None:
        request = self.live.pop(completion.request_id, None)
        assert request is not None, f"{completion.request_id} has ended before, or was never added"
        self.completions[completion.request_id] = completion
        streamed = self.streamed[completion.request_id]
        assert completion.token_ids == tuple(token.token_id for token in streamed)
        assert completion.behavior_logprobs == tuple(token.behavior_logprob for token in streamed)
        assert completion.weight_versions == tuple(token.weight_version for token in streamed)
        assert completion.top_logprobs == tuple(token.top_logprobs for token in streamed if token.top_logprobs)
        assert list(completion.weight_versions) == sorted(completion.weight_versions)
        assert len(completion.token_ids) <= request.sampling.max_tokens
        stopped = completion.token_ids[-1:] and completion.token_ids[-1] in request.sampling.stop_token_ids
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(completion.token_ids) == request.sampling.max_tokens
            assert not stopped
        elif completion.finish_reason is FinishReason.STOP:
            assert stopped or request.sampling.stop_strings
        assert not any(token_id in request.sampling.stop_token_ids for token_id in completion.token_ids[:-1])
