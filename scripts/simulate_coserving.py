"""Admission policies in virtual time: what bench_coserving measures, on emulated engines with known step costs, in a minute.

    python -m scripts.simulate_coserving --trace=azure2023_conv_pub --window=0,300 [--settings=tpot_share=0.8] [--out=F.json]

Step costs are those of design notes' 6M model on one CPU core; a step's true time varies by --noise. Variants: serving_alone,
naive, all_slack (the paper's formula as it reads), idle_only, ours. What it leaves out: Python between steps, HTTP, other
processes. It also says what a decision costs in real time, prediction included.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from common.clock import FakeClock
from common.serving.coserving.admission import AdmissionController, AdmissionSettings
from common.serving.coserving.baselines import AllSlackPolicy, AlternatingPolicy
from common.serving.coserving.calibration import calibrate
from common.serving.coserving.emulated import EmulatedEngine
from common.serving.coserving.events import AdmissionPolicy, Arrived, Decision, Event, Side, StepDone
from common.serving.coserving.objectives import Objectives
from common.serving.coserving.simulation import SERVING_MODEL, CommitEvery, Simulated, simulate
from common.serving.coserving.step_time import StepFeatures
from common.serving.engine import StepLimits, StepPlan
from common.serving.fake import StepTiming
from common.traffic.streams import RolloutStreams, TrajectoryLengths
from common.traffic.trace import Trace, load_trace, packaged_traces
from scripts import entry
from scripts.bench_coserving import SCALES, Scale
from scripts.coserving_rows import Measured, Row, compare, complete, latencies, quartiles, table

_FLAGS = entry.flags_of(__name__)
VARIANTS = ("serving_alone", "naive", "all_slack", "idle_only", "ours", "ours_commit")
_TRACE = flags.DEFINE_list("trace", packaged_traces(), "Traces, one after the other.", flag_values=_FLAGS)
_VARIANTS = flags.DEFINE_list("variants", list(VARIANTS), "Which to simulate; serving_alone always is.", flag_values=_FLAGS)
_WINDOW = flags.DEFINE_list("window", ["0", "300"], "START,END in seconds of the scaled trace.", flag_values=_FLAGS)
_SETTINGS = flags.DEFINE_list("settings", [], "Changes to AdmissionSettings, name=number.", flag_values=_FLAGS)
_STREAMS = flags.DEFINE_integer("streams", 64, "Rollouts at a time.", lower_bound=1, flag_values=_FLAGS)
_CHUNK = flags.DEFINE_integer("serving_step_tokens", 256, "Most tokens of a serving step.", lower_bound=1, flag_values=_FLAGS)
_NOISE = flags.DEFINE_float("noise", 0.05, "Standard deviation of a step's time, relative.", flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of noise and rollouts.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file for the pooled results.", flag_values=_FLAGS)

SWITCH_S = 0.4e-3
OUTLIER_SHARE, OUTLIER_FACTOR = 0.002, 1.5
"""Steps that something else on the machine holds up."""
ROLLOUT_STEP_TOKENS = 1024
ALONE_S = 30.0
COMMITS = CommitEvery(interval_s=10.0, num_slices=50, slice_s=2e-3)
"""200 MB in pieces of 4 MB."""


class Device:
    """Two emulated engines, as noisy as a machine."""

    def __init__(self) -> None:
        self._rng, self._timing = np.random.default_rng(_SEED.value), StepTiming()
        self._last: Side | None = None
        self.clock = FakeClock()
        shapes = {Side.SERVING: (32, 2048), Side.ROLLOUT: (64, 512)}
        self.engines = {side: self._engine(side, *shape) for side, shape in shapes.items()}
        self.limits = {
            Side.SERVING: StepLimits(max_tokens=_CHUNK.value),
            Side.ROLLOUT: StepLimits(max_tokens=ROLLOUT_STEP_TOKENS),
        }

    def _engine(self, side: Side, max_slots: int, max_context_tokens: int) -> EmulatedEngine:
        def duration_s(plan: StepPlan) -> float:
            switch_s = SWITCH_S if self._last not in (None, side) else 0.0
            self._last = side
            outlier = OUTLIER_FACTOR if self._rng.random() < OUTLIER_SHARE else 1.0
            return (self._timing.duration_s(plan) + switch_s) * float(self._rng.lognormal(0, _NOISE.value)) * outlier

        return EmulatedEngine(duration_s, self.clock, max_slots=max_slots, max_context_tokens=max_context_tokens, block_tokens=16)


class Timed:
    """A policy, and how many microseconds of real time it took for each step."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self.policy, self.step_us, self._spent_s = policy, list[float](), 0.0

    def priority_of(self, event: Arrived) -> int:
        return self.policy.priority_of(event)

    def on_event(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        started_s = time.perf_counter()
        decisions = self.policy.on_event(event, now_s)
        self._spent_s += time.perf_counter() - started_s
        if isinstance(event, StepDone):
            self.step_us.append(1e6 * self._spent_s)
            self._spent_s = 0.0
        return decisions


def lengths() -> list[TrajectoryLengths]:
    """About those of mixed-size FrozenLake: prompts of 24 to 76 tokens, 10.6 turns of 2 tokens, 5 new ones between them."""
    rng = np.random.default_rng(_SEED.value)
    return [
        TrajectoryLengths(
            prompt_tokens=int(rng.integers(24, 77)), turn_tokens=(2,) * int(min(48, 1 + rng.exponential(9.6))), new_tokens=5
        )
        for _ in range(200)
    ]


def trace_of(name: str) -> Trace:
    trace = load_trace(name)
    scale = SCALES.get(trace.name, Scale(time=1.0, prompts=1.0, outputs=1.0, window_s=trace.span_s))
    start_s, end_s = map(float, _WINDOW.value)
    trace = trace.scaled(time=scale.time, prompts=scale.prompts, outputs=scale.outputs)
    return trace.window(start_s, min(end_s, trace.span_s))


def measured_of(trace: Trace) -> Measured:
    """Unloaded TTFT by quartile, from the step costs."""
    prompts = [request.prompt_tokens for request in trace.requests]
    classes, timing = quartiles(prompts), StepTiming()
    unloaded: dict[str, float] = {}
    for name in sorted({classes.class_of(count) for count in prompts}):
        typical = int(np.median([count for count in prompts if classes.class_of(count) == name]))
        num_steps = -(-typical // _CHUNK.value)
        unloaded[name] = num_steps * timing.fixed_s + typical * timing.prefill_token_s
    return Measured(classes=classes, unloaded_s=unloaded)


def policy_of(variant: str, objectives: Objectives | None) -> AdmissionPolicy:
    if objectives is None or variant in ("serving_alone", "naive"):
        return AlternatingPolicy(max_step_tokens=ROLLOUT_STEP_TOKENS, rollouts=variant != "serving_alone")
    if variant == "all_slack":
        return AllSlackPolicy(objectives, max_step_tokens=ROLLOUT_STEP_TOKENS)
    changes: dict[str, Any] = {name: float(value) for name, _, value in (change.partition("=") for change in _SETTINGS.value)}
    settings = dataclasses.replace(AdmissionSettings(), spend_slack=variant != "idle_only", **changes)
    longest = StepFeatures(prefill_tokens=_CHUNK.value - 8, decode_tokens=8, context_tokens=4000, switched=True)
    return AdmissionController(objectives, settings, longest_serving_step=longest)


def run(trace: Trace | None, variant: str, objectives: Objectives | None, measured: Measured | None) -> tuple[Simulated, Timed]:
    device, policy = Device(), Timed(policy_of(variant, objectives))
    if objectives is not None:
        calibrate(dict(device.engines), policy, device.clock, limits=device.limits)
        policy.step_us.clear()
    streams = None
    if variant != "serving_alone":
        streams = RolloutStreams(_STREAMS.value, lengths(), vocab_size=2, seed=_SEED.value)
    simulated = simulate(
        trace.requests if trace is not None else (),
        dict(device.engines),
        policy,
        device.clock,
        duration_s=trace.span_s if trace is not None else ALONE_S,
        streams=streams,
        limits=device.limits,
        class_of=lambda request: measured.classes.class_of(len(request.prompt_token_ids)) if measured else "any",
        commits=COMMITS if variant == "ours_commit" else None,
    )
    return simulated, policy


def simulate_trace(name: str) -> list[Row]:
    """Pooled results of all variants on one trace, printed as they come."""
    trace = trace_of(name)
    measured = measured_of(trace)
    alone_rate = run(None, "naive", None, None)[0].rollout_tokens_per_s
    rows: list[Row] = []
    objectives: Objectives | None = None
    extra: dict[str, Row] = {}
    for variant in [variant for variant in VARIANTS if variant == "serving_alone" or variant in _VARIANTS.value]:
        simulated, policy = run(trace, variant, objectives, measured)
        row: Row = {
            "variant": variant,
            "repeat": 0,
            "requests": latencies(simulated.requests),
            "serving_share": simulated.serving_share,
            "rollout_tokens_per_s": simulated.rollout_tokens_per_s,
            "rollout_tokens_by_bin": [],
        }
        rows.append(row)
        if objectives is None:
            objectives = Objectives(by_model={SERVING_MODEL: measured.objectives(rows)})
        extra[variant] = details(policy.policy) | {"decision_us": statistics.median(policy.step_us)}
    alone = rows[:1]
    for row in rows:
        extra[row["variant"]] |= {"busy_share_alone": complete(row, measured, alone, alone_rate)["busy_share_alone"]}
    results = [result | extra[result["variant"]] for result in compare(rows, measured, alone_rate)]
    assert objectives is not None
    say(trace, objectives, alone_rate, results)
    return results


def say(trace: Trace, objectives: Objectives, alone_rate: float, results: list[Row]) -> None:
    by_class = objectives.by_model[SERVING_MODEL].values()
    ttfts = ", ".join(f"{1e3 * objective.ttft_s:.0f}" for objective in by_class)
    tpot_ms = 1e3 * next(iter(by_class)).tpot_s
    print(f"\n{trace.description}: {len(trace.requests)} requests, serving alone is busy {results[0]['busy_share_alone']:.0%}")
    print(f"objectives: TTFT {ttfts} ms by quartile, TPOT {tpot_ms:.0f} ms; rollouts alone {alone_rate:.0f} tokens/s")
    print(table(results))
    for result in results:
        if "error_p90" in result:
            cost = f"{result['decision_us']:.0f} us a decision"
            print(f"{result['variant']}: {cost}, p90 error {result['error_p90']}, {result['level']}")


def details(policy: AdmissionPolicy) -> dict[str, Any]:
    if not isinstance(policy, AdmissionController):
        return {}
    return {
        "error_p90": {str(side): round(predictor.error(), 3) for side, predictor in policy.predictors.items()},
        "level": f"{policy.caution.num_changes} changes of level",
    }


def main() -> None:
    results = {name: simulate_trace(name) for name in _TRACE.value}
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    entry.run(main)
