"""CoServingExecutor over fake engines: each caller gets its one answer, commits keep rollout steps away, nothing overlaps."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from common.clock import FakeClock
from common.errors import EngineClosedError, RequestRejectedError
from common.serving.coserving.admission import AdmissionController
from common.serving.coserving.baselines import AlternatingPolicy
from common.serving.coserving.decision_trace import DecisionTrace, events_from_lines, replay
from common.serving.coserving.device import CoServedDevice
from common.serving.coserving.events import AdmissionPolicy, Side, Work
from common.serving.coserving.executor import CoServedLoop, CoServingExecutor
from common.serving.coserving.objectives import Objective, Objectives
from common.serving.engine import StepLimits, StepPlan, StepResult
from common.serving.fake import FakeEngine
from common.serving.fake_model import make_weights
from common.types import Completion, FinishReason, Request, SamplingKey, SamplingParams
from tests.common.serving.coserving.schedules import LONGEST_SERVING_STEP, controller

WEIGHTS = make_weights(seed=1, vocab_size=20)
OBJECTIVE = Objective(ttft_s=0.4, tpot_s=0.1)


class Watched(FakeEngine):
    """Notes in a log shared by both engines what is done to the device, and fails if two steps are on it."""

    def __init__(self, side: Side, log: list[str], clock: FakeClock, **options: Any) -> None:
        super().__init__(WEIGHTS, max_context_tokens=128, clock=clock, **options)
        self.side, self.log = side, log

    def submit(self, plan: StepPlan) -> None:
        assert not self.log or not self.log[-1].startswith("submit"), "two steps on the device"
        self.log.append(f"submit {self.side}")
        super().submit(plan)

    def collect(self) -> StepResult:
        self.log.append(f"collect {self.side}")
        return super().collect()

    def park(self) -> Iterator[None]:
        for _ in range(3):
            self.log.append("park")
            yield

    def activate(self) -> Iterator[None]:
        for _ in range(2):
            self.log.append("activate")
            yield


class Setup:
    """Two watched engines on a FakeClock behind an executor."""

    def __init__(
        self, policy: AdmissionPolicy | None = None, *, asynchronous: bool = False, rollout: FakeEngine | None = None
    ) -> None:
        self.clock, self.log, self.trace = FakeClock(), list[str](), DecisionTrace()
        self.policy = policy or controller(OBJECTIVE)
        self.executor = CoServingExecutor(self.policy, serving_model="serving", clock=self.clock, on_event=self.trace.listen)
        self.engines = {side: Watched(side, self.log, self.clock, asynchronous=asynchronous) for side in Side}
        if rollout is not None:
            self.engines[Side.ROLLOUT] = rollout  # type: ignore[assignment]
        self.loops: dict[Side, CoServedLoop[Any]] = {
            side: self.executor.drive(side)(engine, max_step_tokens=64) for side, engine in self.engines.items()
        }

    async def __aenter__(self) -> Setup:
        await self.executor.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.executor.__aexit__(*exc)

    def serve(self, number: int, **options: Any) -> Coroutine[Any, Any, Completion]:
        return self.loops[Side.SERVING].generate(request(f"s{number}", number, **options))

    def roll(self, number: int, **options: Any) -> Coroutine[Any, Any, Completion]:
        return self.loops[Side.ROLLOUT].generate(request(f"r{number}", 100 + number, **options))


def request(request_id: str, number: int, *, max_tokens: int = 6) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


def test_a_short_objective_passes_longer_ones_that_came_before_it() -> None:
    by_class = {"short": Objective(ttft_s=0.1, tpot_s=0.1), "long": Objective(ttft_s=10.0, tpot_s=0.1)}
    policy = AdmissionController(Objectives(by_model={"serving": by_class}), longest_serving_step=LONGEST_SERVING_STEP)
    engine = FakeEngine(WEIGHTS, max_context_tokens=128, max_slots=4, clock=FakeClock())
    device = CoServedDevice(
        {Side.SERVING: engine, Side.ROLLOUT: FakeEngine(WEIGHTS, max_context_tokens=128)},
        policy,
        FakeClock(),
        limits={side: StepLimits(max_tokens=8) for side in Side},
        serving_model="serving",
        class_of=lambda request: "short" if len(request.prompt_token_ids) < 10 else "long",
    )
    for number in range(3):
        device.add(Side.SERVING, dataclasses.replace(request(f"long{number}", number), prompt_token_ids=(1,) * 30))
    device.add(Side.SERVING, request("short", 3))
    answered: list[str] = []
    while not answered:
        answered = [token.request_id for _, result in device.turn().results for token in result.tokens]
    assert answered == ["short"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_callers_of_both_models_get_their_own_completions(asynchronous: bool) -> None:
    async def work() -> tuple[list[Completion], Setup]:
        async with Setup(asynchronous=asynchronous) as setup:
            calls = [setup.serve(number) for number in range(5)] + [setup.roll(number) for number in range(20)]
            return await asyncio.gather(*calls), setup

    completions, setup = run(work())
    assert [completion.request_id for completion in completions] == [f"s{n}" for n in range(5)] + [f"r{n}" for n in range(20)]
    assert all(len(completion.token_ids) == 6 for completion in completions)
    assert {entry.split()[1] for entry in setup.log} == {Side.SERVING, Side.ROLLOUT}
    assert setup.loops[Side.ROLLOUT].counters.sampled_tokens == 20 * 6
    assert setup.loops[Side.SERVING].counters.prefill_tokens == 5 * 3


def test_what_is_drawn_does_not_depend_on_the_other_model() -> None:
    async def work(rollouts: int) -> list[tuple[int, ...]]:
        async with Setup() as setup:
            calls = [setup.serve(number, max_tokens=12) for number in range(4)] + [setup.roll(number) for number in range(rollouts)]
            return [completion.token_ids for completion in await asyncio.gather(*calls)][:4]

    assert run(work(0)) == run(work(12))


def test_cancelling_aborts_one_request_of_one_model() -> None:
    async def work() -> tuple[list[Any], Setup]:
        async with Setup() as setup:
            calls = [asyncio.ensure_future(setup.roll(number, max_tokens=60)) for number in range(3)]
            while setup.loops[Side.ROLLOUT].counters.num_steps < 4:
                await asyncio.sleep(0)
            calls[1].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            again = await setup.roll(1)  # its id is free again
            assert len(again.token_ids) == 6
            return results, setup

    results, setup = run(work())
    assert isinstance(results[1], asyncio.CancelledError)
    assert [results[idx].finish_reason for idx in (0, 2)] == [FinishReason.LENGTH] * 2
    assert setup.executor.device.num_live(Side.ROLLOUT) == 0


def test_no_rollout_step_runs_between_the_pieces_of_a_commit_and_serving_steps_may() -> None:
    async def work() -> list[str]:
        async with Setup() as setup:
            setup.log.clear()

            def slices() -> Iterator[None]:
                for _ in range(6):
                    setup.log.append("slice")
                    setup.clock.advance(0.01)
                    yield

            async def arrivals() -> None:
                for number in range(3):
                    while setup.log.count("slice") < 1 + number:
                        await asyncio.sleep(0)
                    await setup.serve(number)

            rollouts = [asyncio.ensure_future(setup.roll(number, max_tokens=40)) for number in range(8)]
            while setup.loops[Side.ROLLOUT].counters.num_steps < 4:
                await asyncio.sleep(0)
            await asyncio.gather(setup.loops[Side.ROLLOUT].between_steps_in_slices(slices), arrivals(), *rollouts)
            return setup.log

    log = run(work())
    first, last = log.index("slice"), len(log) - 1 - log[::-1].index("slice")
    between = log[first:last]
    assert f"submit {Side.ROLLOUT}" not in between
    assert f"submit {Side.SERVING}" in between
    assert f"submit {Side.ROLLOUT}" in log[last:]


def test_an_error_of_a_commit_is_its_callers_alone() -> None:
    async def work() -> None:
        async with Setup() as setup:

            def slices() -> Iterator[None]:
                yield
                raise OSError("the far side is gone")

            for side in Side:
                with pytest.raises(OSError, match="the far side is gone"):
                    await setup.loops[side].between_steps_in_slices(slices)
                assert await setup.loops[side].between_steps(lambda: 7) == 7
            completion = await setup.roll(0)
            assert completion.finish_reason is FinishReason.LENGTH

    run(work())


def test_a_commit_whose_caller_leaves_is_closed_and_rollouts_go_on() -> None:
    async def work() -> list[str]:
        async with Setup() as setup:

            def slices() -> Iterator[None]:
                try:
                    while True:
                        setup.clock.advance(0.01)
                        yield
                finally:
                    setup.log.append("closed")

            commit = asyncio.ensure_future(setup.loops[Side.ROLLOUT].between_steps_in_slices(slices))
            for _ in range(200):
                await asyncio.sleep(0)
            commit.cancel()
            await setup.roll(0)
            return setup.log

    log = run(work())
    assert log.index("closed") < log.index(f"submit {Side.ROLLOUT}")


def test_an_unused_rollout_model_is_parked_and_activated_on_demand_and_both_are_timed() -> None:
    async def work() -> Setup:
        async with Setup() as setup:
            await setup.roll(0)
            while not setup.executor.device.parked:
                setup.clock.advance(1.0)
                setup.executor.arrived.set()
                for _ in range(50):
                    await asyncio.sleep(0)
            await setup.roll(1)
            return setup

    setup = run(work())
    marks = [entry for entry in setup.log if entry in ("park", "activate")]
    assert marks == ["park"] * 3 + ["activate"] * 2
    assert {Work.PARK, Work.ACTIVATE} <= set(setup.executor.device.seconds)


def device_without_rollouts(engine: Watched) -> tuple[CoServedDevice, FakeClock]:
    """Of two watched engines on one clock, whose rollout model has long been unused: the next turns park it."""
    clock = engine._clock
    limits = {side: StepLimits(max_tokens=64) for side in Side}
    engines = {Side.SERVING: Watched(Side.SERVING, engine.log, clock), Side.ROLLOUT: engine}
    device = CoServedDevice(engines, controller(OBJECTIVE), clock, limits=limits, serving_model="serving", class_of=lambda _: "any")
    assert device.turn().waits
    clock.advance(100.0)
    return device, clock


def test_online_requests_are_served_between_the_pieces_of_parking() -> None:
    device, _ = device_without_rollouts(Watched(Side.ROLLOUT, [], FakeClock()))
    device.turn()
    assert device.parked
    device.add(Side.SERVING, request("a", 0, max_tokens=2))
    while device.num_live(Side.SERVING):
        device.turn()
    while not device.turn().waits:
        pass
    log = device.engines[Side.ROLLOUT].log
    assert [entry for entry in log if not entry.startswith("collect")] == ["park", *[f"submit {Side.SERVING}"] * 2, "park", "park"]


def test_a_rollout_in_the_middle_of_parking_is_not_kept_waiting_for_its_end() -> None:
    device, _ = device_without_rollouts(Watched(Side.ROLLOUT, [], FakeClock()))
    device.turn()
    device.add(Side.ROLLOUT, request("a", 0, max_tokens=1))
    while device.num_live(Side.ROLLOUT):
        device.turn()
    assert not device.parked
    assert device.engines[Side.ROLLOUT].log[:4] == ["park", "activate", "activate", f"submit {Side.ROLLOUT}"]


def test_a_model_whose_activation_was_cut_short_is_parked_again() -> None:
    device, clock = device_without_rollouts(Watched(Side.ROLLOUT, [], FakeClock()))
    while not device.turn().waits:
        pass
    device.add(Side.ROLLOUT, request("a", 0))
    device.turn()
    device.abort(Side.ROLLOUT, "a")
    while not device.turn().waits:
        pass
    assert device.num_live(Side.ROLLOUT) == 0
    clock.advance(100.0)
    while not device.turn().waits:
        pass
    log = [entry for entry in device.engines[Side.ROLLOUT].log if entry in ("park", "activate")]
    assert log[:4] == ["park", "park", "park", "activate"]
    assert log[-3:] == ["park", "park", "park"]
    assert device.parked


def test_a_model_that_cannot_be_moved_serves_on() -> None:
    class Full(Watched):
        def park(self) -> Iterator[None]:
            yield from itertools.islice(super().park(), 1)
            raise OSError(28, "No space left on device")

    device, _ = device_without_rollouts(Full(Side.ROLLOUT, [], FakeClock()))
    while not device.turn().waits:
        pass
    assert device.parked
    device.add(Side.ROLLOUT, request("a", 0, max_tokens=1))
    while device.num_live(Side.ROLLOUT):
        device.turn()
    assert device.engines[Side.ROLLOUT].log[-1] == f"collect {Side.ROLLOUT}"


def test_a_failing_engine_reaches_every_caller_of_both_models() -> None:
    class Broken(Watched):
        def collect(self) -> StepResult:
            raise RuntimeError("the device fell off the bus")

    async def work() -> list[Any]:
        async with Setup(AlternatingPolicy(max_step_tokens=64), rollout=Broken(Side.ROLLOUT, [], FakeClock())) as setup:
            calls = [setup.serve(0, max_tokens=60), setup.roll(0), setup.roll(1)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            with pytest.raises(EngineClosedError):
                await setup.serve(1)
            return results

    for result in run(work()):
        assert isinstance(result, EngineClosedError)
        assert "the device fell off the bus" in str(result)


def test_a_request_that_can_never_run_is_refused_and_nothing_else_is_touched() -> None:
    async def work() -> None:
        async with Setup() as setup:
            with pytest.raises(RequestRejectedError):
                await setup.serve(0, max_tokens=10_000)
            assert setup.executor.device.num_live(Side.SERVING) == 0
            assert (await setup.serve(1)).finish_reason is FinishReason.LENGTH

    run(work())


def test_a_request_whose_class_has_no_objective_is_refused_and_leaves_nothing_behind() -> None:
    async def work() -> None:
        objectives = Objectives(by_model={"serving": {"chat": OBJECTIVE}})
        policy = AdmissionController(objectives, longest_serving_step=LONGEST_SERVING_STEP)
        async with Setup(policy) as setup:
            with pytest.raises(ValueError, match="no objective for class 'any', only for chat"):
                await setup.serve(0)
            await setup.roll(0)
            assert setup.executor.device.num_live(Side.SERVING) == 0

    run(work())


def test_leaving_fails_what_is_unfinished() -> None:
    async def work() -> list[Any]:
        async with Setup() as setup:
            calls = [asyncio.ensure_future(setup.roll(0, max_tokens=100)), asyncio.ensure_future(setup.serve(0, max_tokens=100))]
            while setup.loops[Side.SERVING].counters.num_steps < 2:
                await asyncio.sleep(0)
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(result, EngineClosedError) for result in run(work()))


def test_both_sides_must_be_driven() -> None:
    async def work() -> None:
        executor = CoServingExecutor(controller(OBJECTIVE), serving_model="serving")
        executor.drive(Side.SERVING)(FakeEngine(WEIGHTS), max_step_tokens=8)
        with pytest.raises(ValueError, match="nothing drives rollout"):
            await executor.__aenter__()

    run(work())


def test_by_turns_both_models_step_alternately() -> None:
    async def work() -> list[str]:
        async with Setup(AlternatingPolicy(max_step_tokens=64)) as setup:
            await asyncio.gather(setup.serve(0, max_tokens=10), setup.roll(0, max_tokens=10))
            return [entry for entry in setup.log if entry.startswith("submit")]

    log = run(work())
    assert all(first != second for first, second in itertools.pairwise(log[:18]))


def test_a_log_replays_to_the_same_decisions(tmp_path: Any) -> None:
    async def work() -> Setup:
        async with Setup() as setup:
            calls = [setup.serve(number, max_tokens=20) for number in range(5)]
            await asyncio.gather(*calls, *(setup.roll(number, max_tokens=20) for number in range(12)))
            return setup

    setup = run(work())
    entries = list(setup.trace)
    assert isinstance(setup.policy, AdmissionController)
    again = replay(controller(OBJECTIVE), events_from_lines(setup.trace.lines()))
    assert again == [decisions for _, _, decisions in entries]
    assert sum(setup.trace.counts.values()) == sum(len(decisions) for decisions in again)
    setup.trace.write_chrome_trace(tmp_path / "trace.json")
