"""The device process of a co-serving benchmark: engines on one core, the executor, rollouts that never run short.

It has two channels: one to the front, as scripts.serve's engine process has, and one to the benchmark, over which each run is
begun and ended. Messages of the second, by "kind": calibrate, begin (variant, streams, objectives, lengths), end (window); each
is answered once. All threads stay on the core that is given. With --side=rollout it holds the rollout engine alone, under
SCHED_IDLE; with --side=stock one stock vLLM engine for everything.

    python -m scripts.coserving_device --backend=jetstream --core=0 --control_fd=N --front_fd=M   (started by bench_coserving)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
from absl import flags

from common.clock import MonotonicClock
from common.errors import EngineClosedError
from common.serving.coserving.admission import AdmissionController, AdmissionSettings
from common.serving.coserving.baselines import AlternatingPolicy
from common.serving.coserving.calibration import calibrate
from common.serving.coserving.decision_trace import DecisionTrace
from common.serving.coserving.events import AdmissionPolicy, Arrived, Decision, Event, Free, Planned, Side, StepDone
from common.serving.coserving.executor import CoServingExecutor
from common.serving.coserving.objectives import LengthClasses, Objective, Objectives
from common.serving.coserving.step_time import StepTimePredictor
from common.serving.engine import StepEngine, StepLimits, StepResult
from common.serving.front.channel import Channel, ChannelClosedError
from common.serving.front.engine_server import EngineServer
from common.serving.replica import LocalReplica
from common.traffic.streams import RolloutStreams, TrajectoryLengths
from common.transfer.publisher import Publisher
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.types import Request
from scripts import entry
from scripts.coserving_engines import BACKENDS, SHAPES, build, longest_serving_step

_FLAGS = entry.flags_of(__name__)
_BACKEND = flags.DEFINE_enum("backend", "jetstream", BACKENDS, "Engines.", flag_values=_FLAGS)
_CORE = flags.DEFINE_integer("core", 0, "The core that is the device.", flag_values=_FLAGS)
_SIDE = flags.DEFINE_enum(
    "side",
    "both",
    ["both", "rollout", "stock"],
    "What it holds; rollout: under SCHED_IDLE.",
    flag_values=_FLAGS,
)
_CONTROL_FD = flags.DEFINE_integer("control_fd", None, "Socket to the benchmark.", flag_values=_FLAGS)
_FRONT_FD = flags.DEFINE_integer("front_fd", None, "Socket to the front.", flag_values=_FLAGS)
_MODELS = flags.DEFINE_string("models", "", "Folder with a model for each side, for vllm.", flag_values=_FLAGS)
_VOCAB = flags.DEFINE_integer("vocab_size", 64, "Of both models.", flag_values=_FLAGS)

SERVING_MODEL = "serving"
COMMIT_BYTES, COMMIT_SLICE_BYTES = 200 << 20, 4 << 20
"""A 100M-parameter model in bfloat16, written in pieces of the size that engines commit in."""
COMMIT_INTERVAL_S = 10.0


class SwitchedPolicy:
    """The policy of the run at hand, and how long it thought about each step."""

    def __init__(self) -> None:
        self.policy: AdmissionPolicy = AlternatingPolicy(max_step_tokens=1)
        self.classes = LengthClasses(bounds=())
        self.decision_us: list[float] = []
        self._spent_s = 0.0

    def class_of(self, request: Request) -> str:
        return self.classes.class_of(len(request.prompt_token_ids))

    def priority_of(self, event: Arrived) -> int:
        return self.policy.priority_of(event)

    def on_event(self, event: Event, now_s: float) -> tuple[Decision, ...]:
        started_s = time.perf_counter()
        decisions = self.policy.on_event(event, now_s)
        self._spent_s += time.perf_counter() - started_s
        if isinstance(event, StepDone):
            self.decision_us.append(1e6 * self._spent_s)
            self._spent_s = 0.0
        elif not isinstance(event, Free | Planned):
            self._spent_s = 0.0  # arrivals and ends are no part of a step's decision
        return decisions


class Steps:
    """When steps ended, how long they took and how many tokens they gave, by side."""

    def __init__(self) -> None:
        self._rows: dict[Side, list[tuple[float, float, int]]] = {side: [] for side in Side}

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()

    def add(self, side: Side, end_s: float, duration_s: float, num_tokens: int) -> None:
        self._rows[side].append((end_s, duration_s, num_tokens))

    def watch(self, result: StepResult) -> None:
        """A rollout step's result."""
        self.add(Side.ROLLOUT, time.monotonic(), result.device_s, len(result.tokens))

    def within(self, side: Side, start_s: float, end_s: float) -> tuple[float, int]:
        """Device seconds and tokens of steps that ended in a window."""
        rows = [row for row in self._rows[side] if start_s <= row[0] < end_s]
        return sum(row[1] for row in rows), sum(row[2] for row in rows)

    def tokens_by_bin(self, side: Side, start_s: float, end_s: float, bin_s: float) -> list[int]:
        edges = np.arange(start_s, end_s + bin_s, bin_s)
        rows = self._rows[side]
        counts, _ = np.histogram([row[0] for row in rows], edges, weights=[row[2] for row in rows])
        return [int(count) for count in counts]


@dataclasses.dataclass(kw_only=True)
class Device:
    """What runs come and go on. `loop` is what rollouts are sent to."""

    switch: SwitchedPolicy
    steps: Steps
    generate: Any
    predictors: dict[Side, StepTimePredictor]
    engines: dict[Side, StepEngine[Any]]
    executor: CoServingExecutor | None
    rollouts: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)
    trace: DecisionTrace = dataclasses.field(default_factory=DecisionTrace)
    num_commits: int = 0

    def listen(self, event: Event, now_s: float, decisions: tuple[Decision, ...]) -> None:
        self.trace.listen(event, now_s, decisions)
        if isinstance(event, StepDone) and event.side is Side.SERVING:
            self.steps.add(Side.SERVING, now_s, event.duration_s, sum(count for _, count in event.tokens))

    def policy_of(self, variant: str, message: dict[str, Any]) -> AdmissionPolicy:
        most = SHAPES[Side.ROLLOUT].max_step_tokens
        if variant in ("serving_alone", "sched_idle"):
            return AlternatingPolicy(max_step_tokens=most, rollouts=False)
        if variant in ("naive", "rollout_alone", "priority"):
            return AlternatingPolicy(max_step_tokens=most)
        objectives = {name: Objective(ttft_s=ttft_s, tpot_s=tpot_s) for name, (ttft_s, tpot_s) in message["objectives"].items()}
        settings = AdmissionSettings(spend_slack=variant != "idle_only", max_step_tokens=most, **message.get("settings", {}))
        policy = AdmissionController(
            Objectives(by_model={SERVING_MODEL: objectives}), settings, longest_serving_step=longest_serving_step()
        )
        policy.predictors.update(self.predictors)
        return policy

    async def begin(self, message: dict[str, Any]) -> dict[str, Any]:
        variant = message["variant"]
        self.switch.classes = LengthClasses(bounds=tuple(message.get("bounds", ())))
        self.switch.policy = self.policy_of(variant, message)
        self.switch.decision_us.clear()
        self.steps.clear()
        self.trace = DecisionTrace()
        self.num_commits = 0
        if message["streams"]:
            lengths = [
                TrajectoryLengths(prompt_tokens=prompt, turn_tokens=tuple(turns), new_tokens=new)
                for prompt, turns, new in message["lengths"]
            ]
            streams = RolloutStreams(message["streams"], lengths, vocab_size=_VOCAB.value, seed=message["seed"])
            self.rollouts = [asyncio.create_task(self._stream(streams, request)) for request in streams.start()]
        if variant == "ours_commit":
            self.rollouts.append(asyncio.create_task(self._commit_for_ever()))
        return {}

    async def end(self, message: dict[str, Any]) -> dict[str, Any]:
        for task in self.rollouts:
            task.cancel()
        await asyncio.gather(*self.rollouts, return_exceptions=True)
        self.rollouts.clear()
        while any(engine.load().running_requests + engine.load().waiting_requests for engine in self.engines.values()):
            await asyncio.sleep(0.01)
        start_s, end_s = message["start_s"], message["end_s"]
        serving_s, _ = self.steps.within(Side.SERVING, start_s, end_s)
        rollout_s, rollout_tokens = self.steps.within(Side.ROLLOUT, start_s, end_s)
        found: dict[str, Any] = {
            "serving_share": serving_s / (end_s - start_s),
            "rollout_share": rollout_s / (end_s - start_s),
            "rollout_tokens": rollout_tokens,
            "rollout_tokens_by_bin": self.steps.tokens_by_bin(Side.ROLLOUT, start_s, end_s, message["bin_s"]),
            "decision_us": statistics.median(self.switch.decision_us) if self.switch.decision_us else None,
            "commits": self.num_commits,
            "affinity": sorted(os.sched_getaffinity(0)),
            "scheduler": os.sched_getscheduler(0),
        }
        if isinstance(self.switch.policy, AdmissionController):
            found["error_p90"] = {str(side): predictor.error() for side, predictor in self.switch.policy.predictors.items()}
            found["level_changes"] = self.switch.policy.caution.num_changes
            found["decisions"] = dict(self.trace.counts)
            if message.get("trace_file"):
                self.trace.write_chrome_trace(Path(message["trace_file"]))
        return found

    async def calibrate(self) -> dict[str, Any]:
        policy = self.policy_of("ours", {"objectives": {"any": (1.0, 1.0)}})
        calibrate(self.engines, policy, MonotonicClock(), limits=limits())
        return {"error_p90": {str(side): predictor.error() for side, predictor in self.predictors.items()}}

    async def _stream(self, streams: RolloutStreams, request: Request) -> None:
        while True:
            request = streams.next(await self.generate(request))

    async def _commit_for_ever(self) -> None:
        assert self.executor is not None
        live, staged = np.zeros(COMMIT_BYTES, np.uint8), np.ones(COMMIT_BYTES, np.uint8)

        def slices() -> Iterator[None]:
            for start in range(0, COMMIT_BYTES, COMMIT_SLICE_BYTES):
                live[start : start + COMMIT_SLICE_BYTES] = staged[start : start + COMMIT_SLICE_BYTES]
                yield

        while True:
            await asyncio.sleep(COMMIT_INTERVAL_S)
            await self.executor.commit(Side.ROLLOUT, slices)
            self.num_commits += 1


def limits() -> dict[Side, StepLimits]:
    return {side: StepLimits(max_tokens=shape.max_step_tokens) for side, shape in SHAPES.items()}


async def obey(control: Channel, device: Device) -> None:
    """Do what the benchmark says until it is gone."""
    control.send({"kind": "ready"})
    while True:
        try:
            message = await control.receive()
        except ChannelClosedError:
            return
        match message["kind"]:
            case "calibrate":
                answer = await device.calibrate()
            case "begin":
                answer = await device.begin(message)
            case "end":
                answer = await device.end(message)
            case kind:
                raise AssertionError(f"the benchmark sent a message of unknown kind {kind!r}")
        control.send({"kind": "answer", **answer})


def replica_of(name: str, engine: StepEngine[Any], target: Any, side: Side, drive: Any) -> tuple[LocalReplica[Any], Subscriber]:
    """A replica that serves the weights its engine was built with, as version 0."""
    store = MemoryStore()
    with contextlib.closing(Publisher(store)) as publisher:
        publisher.publish(0, {tensor: target.published(tensor) for tensor in target.specs()}).result()
    subscriber = Subscriber(store, target, receiver_id=name)
    assert subscriber.adopt() == 0, "the engine does not hold what it was built with"
    shape = SHAPES[side]
    return LocalReplica(name, engine, subscriber, max_step_tokens=shape.max_step_tokens, drive=drive), subscriber


async def co_serve(engines: dict[Side, StepEngine[Any]], targets: dict[Side, Any], control: Channel, front: Channel) -> None:
    switch, steps = SwitchedPolicy(), Steps()
    device = Device(
        switch=switch,
        steps=steps,
        generate=None,
        predictors={side: StepTimePredictor() for side in Side},
        engines=engines,
        executor=None,
    )
    executor = CoServingExecutor(
        switch,
        serving_model=SERVING_MODEL,
        class_of=switch.class_of,
        on_event=device.listen,
    )
    replicas = {side: replica_of(str(side), engines[side], targets[side], side, executor.drive(side))[0] for side in Side}
    device.executor, device.generate = executor, replicas[Side.ROLLOUT].generate
    async with executor, replicas[Side.SERVING], replicas[Side.ROLLOUT]:
        replicas[Side.ROLLOUT].watch_steps(steps.watch)
        info = engines[Side.SERVING].info
        server = EngineServer(front, replicas[Side.SERVING], targets[Side.SERVING], info=info, subscribe=refuse)
        serving = asyncio.create_task(server.serve())
        await obey(control, device)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def roll_out_alone(engine: StepEngine[Any], target: Any, control: Channel) -> None:
    """The rollout engine in a process of its own, which the scheduler runs when nobody else wants the core."""
    from common.serving.loop import EngineLoop

    steps = Steps()
    replica, _ = replica_of("rollout", engine, target, Side.ROLLOUT, EngineLoop)
    async with replica:
        replica.watch_steps(steps.watch)
        device = Device(
            switch=SwitchedPolicy(),
            steps=steps,
            generate=replica.generate,
            predictors={},
            engines={Side.ROLLOUT: engine},
            executor=None,
        )
        await obey(control, device)


async def serve_stock(control: Channel, front: Channel) -> None:
    """One stock vLLM engine for both kinds of requests."""
    from scripts.coserving_stock import StockReplica

    serving, rollout = SHAPES[Side.SERVING], SHAPES[Side.ROLLOUT]
    steps = Steps()
    replica = StockReplica(
        Path(_MODELS.value) / str(Side.SERVING),
        vocab_size=_VOCAB.value,
        max_slots=serving.max_slots + rollout.max_slots,
        max_context_tokens=serving.max_context_tokens,
        max_step_tokens=serving.max_step_tokens,
    )
    replica.on_rollout_step = lambda seconds, tokens: steps.add(Side.ROLLOUT, time.monotonic(), seconds, tokens)
    async with replica:
        server = EngineServer(front, cast(LocalReplica[Any], replica), cast(Any, None), info=replica.info, subscribe=refuse)
        serving_task = asyncio.create_task(server.serve())
        device = Device(switch=SwitchedPolicy(), steps=steps, generate=replica.generate, predictors={}, engines={}, executor=None)
        await obey(control, device)
        serving_task.cancel()
        await asyncio.gather(serving_task, return_exceptions=True)


def refuse(address: str) -> Subscriber:
    raise ValueError(f"this replica takes no weights, asked for {address}")


async def run() -> None:
    control = await Channel.over(socket.socket(fileno=_CONTROL_FD.value))
    if _SIDE.value == "stock":
        await serve_stock(control, await Channel.over(socket.socket(fileno=_FRONT_FD.value)))
        await control.close()
        return
    sides = list(Side) if _SIDE.value == "both" else [Side.ROLLOUT]
    built = {side: build(_BACKEND.value, side, vocab_size=_VOCAB.value, folder=Path(_MODELS.value) / str(side)) for side in sides}
    engines = {side: engine for side, (engine, _) in built.items()}
    try:
        if _SIDE.value == "both":
            front = await Channel.over(socket.socket(fileno=_FRONT_FD.value))
            await co_serve(engines, {side: target for side, (_, target) in built.items()}, control, front)
        else:
            await roll_out_alone(engines[Side.ROLLOUT], built[Side.ROLLOUT][1], control)
    except EngineClosedError as error:
        control.send({"kind": "failed", "text": str(error)})
        raise
    finally:
        await control.close()
        for engine in engines.values():
            engine.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal all get it; the benchmark closes the channel
    os.sched_setaffinity(0, {_CORE.value})
    if _SIDE.value == "rollout":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # before any thread is made: they inherit it
    asyncio.run(run())


if __name__ == "__main__":
    entry.run(main, required=["control_fd"])
