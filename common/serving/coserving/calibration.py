"""Calibration: steps of mixed sizes on both engines before the first request, so that step times are known from the beginning.

Weights fitted to steps that are all alike say nonsense about any other, and a first guess is needed before anything is admitted.
It runs requests of its own, ends them, and leaves both engines empty. It refuses engines that hold requests. Invariant: the policy
is told of these steps as of any others, and knows of no request that was made here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from common.clock import Clock
from common.serving.coserving.events import AdmissionPolicy, Side, StepDone
from common.serving.coserving.step_time import StepFeatures
from common.serving.engine import StepEngine, StepLimits
from common.types import Request, SamplingKey, SamplingParams

STEPS_A_BATCH = 10
CONTEXT_SHARES = (0.02, 0.1, 0.3)
"""Of the longest context, prompts of a batch: short ones are most of what there is, long ones teach what context costs."""
SWITCH_EVERY = 2
"""Steps of one engine before the other's turn, so that the cost of a switch is seen."""


def calibrate(
    engines: dict[Side, StepEngine[Any]], policy: AdmissionPolicy, clock: Clock, *, limits: dict[Side, StepLimits], seed: int = 0
) -> None:
    """Run about a hundred steps of each engine and tell the policy how long each took. Blocks."""
    for side, engine in engines.items():
        load = engine.load()
        if load.running_requests or load.waiting_requests:
            raise ValueError(f"the {side} engine holds {load}; calibrate before the first request")
    rng = np.random.default_rng(seed)
    turns = [_steps(side, engines[side], policy, clock, limits[side], rng) for side in Side]
    for steps in itertools.cycle(list(turns)):
        for _ in range(SWITCH_EVERY):
            if next(steps, None) is None and steps in turns:
                turns.remove(steps)
        if not turns:
            return


def _steps(
    side: Side, engine: StepEngine[Any], policy: AdmissionPolicy, clock: Clock, limits: StepLimits, rng: np.random.Generator
) -> Iterator[bool]:
    """One step at a time, of batches of few and of many sequences, under budgets from small to the largest."""
    info = engine.info
    sizes = sorted({1, max(1, info.max_slots // 8), max(1, info.max_slots // 2), info.max_slots})
    most_generated = max(1, info.max_context_tokens // 2)
    num_made = 0
    for num_sequences, share in itertools.product(sizes, CONTEXT_SHARES):
        ids = []
        for _ in range(num_sequences):
            longest = max(1, int(share * info.max_context_tokens))
            num_made += 1
            ids.append(f"calibration.{side}.{num_made}")
            engine.add(_request(ids[-1], int(rng.integers(1, longest + 1)), most_generated, info.vocab_size, num_made, rng))
        for _ in range(STEPS_A_BATCH):
            most = int(np.exp(rng.uniform(np.log(min(16, limits.max_tokens)), np.log(limits.max_tokens))))
            plan = engine.plan(dataclasses.replace(limits, max_tokens=most))
            if plan is None:
                break
            started_s = clock.now_s()
            engine.submit(plan)
            engine.collect()
            now_s = clock.now_s()
            features = StepFeatures.of(plan)
            policy.on_event(StepDone(side=side, features=features, duration_s=now_s - started_s, tokens=()), now_s)
            yield True
        for request_id in ids:
            engine.abort(request_id)
        engine.drain()


def _request(request_id: str, num_tokens: int, max_tokens: int, vocab_size: int, number: int, rng: np.random.Generator) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(rng.integers(0, vocab_size, num_tokens).tolist()),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=0, trajectory_id=number, turn_idx=0),
        cache_namespace="calibration",
    )
