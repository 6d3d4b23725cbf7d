"""Random schedules in virtual time for tests: arrivals, engines whose true durations stay within an error, and the controller."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np

from common.clock import FakeClock
from common.serving.coserving.admission import AdmissionController, AdmissionSettings
from common.serving.coserving.baselines import AlternatingPolicy
from common.serving.coserving.calibration import calibrate
from common.serving.coserving.device import OnEvent
from common.serving.coserving.emulated import EmulatedEngine
from common.serving.coserving.events import AdmissionPolicy, Side
from common.serving.coserving.objectives import Objective, Objectives
from common.serving.coserving.simulation import SERVING_MODEL, CommitEvery, Simulated, simulate
from common.serving.coserving.step_time import StepFeatures
from common.serving.engine import StepLimits, StepPlan
from common.serving.fake import StepTiming
from common.traffic.streams import RolloutStreams, TrajectoryLengths
from common.traffic.trace import TraceRequest

TIMING = StepTiming()
SWITCH_S = 0.4e-3
MAX_STEP_TOKENS = {Side.SERVING: 192, Side.ROLLOUT: 1024}
SLOTS = {Side.SERVING: 16, Side.ROLLOUT: 48}
LONGEST_SERVING_STEP = StepFeatures(
    prefill_tokens=MAX_STEP_TOKENS[Side.SERVING], decode_tokens=SLOTS[Side.SERVING], context_tokens=4000, switched=True
)
LENGTHS = tuple(
    TrajectoryLengths(prompt_tokens=prompt, turn_tokens=(2,) * turns, new_tokens=5)
    for prompt, turns in ((24, 3), (46, 8), (76, 20), (60, 12))
)


@dataclasses.dataclass(kw_only=True)
class Durations:
    """True seconds of a step: the formula times a factor in [1 - error, 1 + error]; `surprise` multiplies rollout steps."""

    error: float
    rng: np.random.Generator
    surprise: float = 1.0
    scale: float = 1.0
    last: Side | None = None

    def of(self, side: Side, plan: StepPlan) -> float:
        switch_s = SWITCH_S if self.last is not None and self.last is not side else 0.0
        self.last = side
        factor = self.scale * self.rng.uniform(1 - self.error, 1 + self.error)
        return (TIMING.duration_s(plan) + switch_s) * factor * (self.surprise if side is Side.ROLLOUT else 1.0)


@dataclasses.dataclass(kw_only=True)
class Device:
    """Two emulated engines on one clock, the controller calibrated on them."""

    clock: FakeClock
    durations: Durations
    engines: dict[Side, EmulatedEngine]

    @classmethod
    def make(cls, *, error: float, seed: int) -> Device:
        clock, durations = FakeClock(), Durations(error=error, rng=np.random.default_rng([seed, 1]))
        engines = {
            side: EmulatedEngine(
                lambda plan, side=side: durations.of(side, plan), clock, max_slots=SLOTS[side], max_context_tokens=2048
            )
            for side in Side
        }
        return cls(clock=clock, durations=durations, engines=engines)

    def calibrate(self, policy: AdmissionPolicy) -> None:
        calibrate(dict(self.engines), policy, self.clock, limits=limits())

    def run(
        self,
        arrivals: list[TraceRequest],
        policy: AdmissionPolicy,
        *,
        duration_s: float,
        num_streams: int,
        commits: CommitEvery | None = None,
        on_event: OnEvent | None = None,
    ) -> Simulated:
        streams = RolloutStreams(num_streams, LENGTHS, vocab_size=1, seed=0) if num_streams else None
        return simulate(
            arrivals,
            dict(self.engines),
            policy,
            self.clock,
            duration_s=duration_s,
            streams=streams,
            limits=limits(),
            commits=commits,
            on_event=on_event,
        )


def limits() -> dict[Side, StepLimits]:
    return {side: StepLimits(max_tokens=tokens) for side, tokens in MAX_STEP_TOKENS.items()}


def controller(objective: Objective, settings: AdmissionSettings | None = None) -> AdmissionController:
    return AdmissionController(Objectives.of(SERVING_MODEL, objective), settings, longest_serving_step=LONGEST_SERVING_STEP)


@functools.cache
def _calibrated(objective: Objective, settings: AdmissionSettings | None, error: float) -> AdmissionController:
    policy = controller(objective, settings)
    Device.make(error=error, seed=0).calibrate(policy)
    return policy


def calibrated(objective: Objective, settings: AdmissionSettings | None = None, *, error: float = 0.02) -> AdmissionController:
    """A controller that knows the step times of such engines."""
    return copy.deepcopy(_calibrated(objective, settings, error))


def serving_alone() -> AlternatingPolicy:
    return AlternatingPolicy(max_step_tokens=1, rollouts=False)


def random_arrivals(rng: np.random.Generator, *, duration_s: float, rate_per_s: float, max_prompt: int, max_output: int) -> list:
    """Bursts of Poisson arrivals with pauses between them, lengths log-uniform."""
    arrivals: list[TraceRequest] = []
    now_s = float(rng.exponential(0.2))
    while now_s < duration_s:
        burst = 1 + int(rng.geometric(0.5)) if rng.random() < 0.3 else 1
        for _ in range(burst):
            arrivals.append(
                TraceRequest(
                    arrival_s=now_s,
                    prompt_tokens=int(np.exp(rng.uniform(0, np.log(max_prompt)))),
                    output_tokens=int(np.exp(rng.uniform(0, np.log(max_output)))),
                )
            )
            now_s += float(rng.exponential(0.005))
        now_s += float(rng.exponential(burst / rate_per_s))
    return [arrival for arrival in arrivals if arrival.arrival_s < duration_s]
