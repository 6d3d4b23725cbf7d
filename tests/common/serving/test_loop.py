"""EngineLoop over the fake engine: each caller gets its one answer, whatever ends it, and steps are made of the requests alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import StepPlan, StepResult
from common.serving.fake import FakeEngine
from common.serving.fake_model import FakeWeights, make_weights
from common.serving.loop import QUIET_PASSES, EngineLoop
from common.types import Completion, FinishReason, Request, SamplingKey, SamplingParams

VOCAB_SIZE = 20
WEIGHTS = make_weights(seed=1, vocab_size=VOCAB_SIZE)


class RecordingEngine(FakeEngine):
    """Keeps every plan that was submitted; breaks at step `fails_at` if one is given."""

    def __init__(self, *, fails_at: int | None = None, max_slots: int = 4, asynchronous: bool = False) -> None:
        super().__init__(WEIGHTS, max_slots=max_slots, max_context_tokens=64, asynchronous=asynchronous)
        self.plans: list[StepPlan] = []
        self._fails_at = fails_at

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        super().submit(plan)

    def collect(self) -> StepResult:
        if self._fails_at is not None and len(self.plans) > self._fails_at:
            raise RuntimeError("the device fell off the bus")
        return super().collect()


def request(number: int, *, max_tokens: int = 6, prompt_token_ids: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(
        request_id=f"r{number}",
        prompt_token_ids=prompt_token_ids,
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


async def settled(*calls: Awaitable[Completion]) -> list[Completion | BaseException]:
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_generate_returns_the_one_completion_of_its_request(asynchronous: bool) -> None:
    engine = RecordingEngine(asynchronous=asynchronous)

    async def work() -> list[Completion]:
        async with EngineLoop(engine, max_step_tokens=32) as loop:
            return await asyncio.gather(*(loop.generate(request(number)) for number in range(11)))

    completions = run(work())
    assert [completion.request_id for completion in completions] == [f"r{number}" for number in range(11)]
    assert all(len(completion.token_ids) == 6 for completion in completions)
    assert (engine.load().running_requests, engine.load().waiting_requests) == (0, 0)


def test_what_a_request_draws_does_not_depend_on_its_company() -> None:
    async def work(numbers: range) -> dict[str, tuple[int, ...]]:
        async with EngineLoop(RecordingEngine(), max_step_tokens=8) as loop:
            completions = await asyncio.gather(*(loop.generate(request(number)) for number in numbers))
        return {completion.request_id: completion.token_ids for completion in completions}

    together = run(work(range(9)))
    assert len(set(together.values())) > 1
    for number in (0, 4, 8):
        assert run(work(range(number, number + 1))) == {f"r{number}": together[f"r{number}"]}


def test_counters_are_the_sums_over_the_steps() -> None:
    engine = RecordingEngine()

    async def work() -> EngineLoop[FakeWeights]:
        async with EngineLoop(engine, max_step_tokens=32) as loop:
            await asyncio.gather(*(loop.generate(request(number)) for number in range(6)))
            return loop

    counters = run(work()).counters
    assert counters.num_steps == len(engine.plans)
    assert counters.sampled_tokens == 6 * 6
    assert counters.prefill_tokens == sum(plan.prefill_tokens for plan in engine.plans) == 6 * 3
    assert counters.device_s > 0


def test_cancelling_a_call_aborts_its_request_and_no_other() -> None:
    engine = RecordingEngine()

    async def work() -> list[Completion | BaseException]:
        async with EngineLoop(engine, max_step_tokens=32) as loop:
            calls = [asyncio.ensure_future(loop.generate(request(number, max_tokens=40))) for number in range(3)]
            while loop.counters.num_steps < 5:
                await asyncio.sleep(0)
            calls[1].cancel()
            results = await settled(*calls)
            assert (engine.load().running_requests, engine.load().waiting_requests) == (0, 0)
            return results

    first, cancelled, last = run(work())
    assert isinstance(cancelled, asyncio.CancelledError)
    for completion in (first, last):
        assert isinstance(completion, Completion)
        assert completion.finish_reason is FinishReason.LENGTH
    num_cancelled_tokens = sum(entry.request_id == "r1" for plan in engine.plans for entry in plan.decode)
    assert num_cancelled_tokens < 39


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_asked_for_again_after_a_cancelled_call_gets_an_answer_of_its_own(asynchronous: bool) -> None:
    async def work() -> list[Completion]:
        async with EngineLoop(RecordingEngine(asynchronous=asynchronous), max_step_tokens=32) as loop:
            undisturbed = await loop.generate(request(0))
            first = asyncio.ensure_future(loop.generate(request(0)))
            while loop.counters.num_steps < 9:
                await asyncio.sleep(0)
            first.cancel()
            await settled(first)
            return [undisturbed, await loop.generate(request(0))]

    undisturbed, again = run(work())
    assert again == undisturbed
    assert again.finish_reason is FinishReason.LENGTH


def test_a_loop_that_stops_leaves_nobody_waiting_for_the_end_of_a_cancelled_call() -> None:
    async def work() -> tuple[Completion | BaseException, ...]:
        async with EngineLoop(RecordingEngine(), max_step_tokens=32) as loop:
            first = asyncio.ensure_future(loop.generate(request(0, max_tokens=40)))
            while loop.counters.num_steps < 3:
                await asyncio.sleep(0)
            first.cancel()
            await settled(first)
            second = asyncio.ensure_future(loop.generate(request(0)))
            await asyncio.sleep(0)
        return tuple(await settled(second))

    (answer,) = run(work())
    assert isinstance(answer, EngineClosedError)


def test_a_call_that_is_cancelled_while_it_waits_for_a_slot_never_runs() -> None:
    engine = RecordingEngine(max_slots=1)

    async def work() -> None:
        async with EngineLoop(engine, max_step_tokens=32) as loop:
            first = asyncio.ensure_future(loop.generate(request(0, max_tokens=20)))
            second = asyncio.ensure_future(loop.generate(request(1)))
            while loop.counters.num_steps < 3:
                await asyncio.sleep(0)
            second.cancel()
            await settled(first, second)

    run(work())
    planned = {entry.request_id for plan in engine.plans for entry in (*plan.prefill, *plan.decode)}
    assert planned == {"r0"}


def test_a_failing_engine_reaches_every_caller_with_its_own_words() -> None:
    async def work() -> tuple[list[Completion | BaseException], Completion | BaseException]:
        async with EngineLoop(RecordingEngine(fails_at=2), max_step_tokens=32) as loop:
            results = await settled(*(loop.generate(request(number)) for number in range(7)))
            (late,) = await settled(loop.generate(request(7)))
            return results, late

    results, late = run(work())
    for result in results:
        assert isinstance(result, EngineClosedError)
        assert "the device fell off the bus" in str(result)
        assert isinstance(result.__cause__, RuntimeError)
    assert isinstance(late, EngineClosedError)
    assert "r7" in str(late)


def test_a_rejected_request_fails_alone() -> None:
    async def work() -> list[Completion | BaseException]:
        async with EngineLoop(RecordingEngine(), max_step_tokens=32) as loop:
            return await settled(
                loop.generate(request(0)), loop.generate(request(1, prompt_token_ids=())), loop.generate(request(2))
            )

    first, rejected, last = run(work())
    assert isinstance(rejected, RequestRejectedError)
    assert "empty" in str(rejected)
    assert isinstance(first, Completion)
    assert isinstance(last, Completion)


def test_the_same_id_twice_in_flight_is_refused_and_the_first_goes_on() -> None:
    async def work() -> list[Completion | BaseException]:
        async with EngineLoop(RecordingEngine(), max_step_tokens=32) as loop:
            both = await settled(loop.generate(request(0)), loop.generate(request(0)))
            again = await loop.generate(request(0))  # the id is free once its request has ended
            return [*both, again]

    first, second, again = run(work())
    assert isinstance(first, Completion)
    assert isinstance(second, ValueError)
    assert "'r0'" in str(second)
    assert again == first


def test_stopping_the_loop_ends_what_is_in_flight_with_an_error() -> None:
    async def work() -> tuple[list[Completion | BaseException], Completion | BaseException]:
        async with EngineLoop(RecordingEngine(), max_step_tokens=32) as loop:
            calls = [asyncio.ensure_future(loop.generate(request(number, max_tokens=40))) for number in range(6)]
            while loop.counters.num_steps < 3:
                await asyncio.sleep(0)
        results = await settled(*calls)
        (late,) = await settled(loop.generate(request(9)))
        return results, late

    results, late = run(work())
    assert all(isinstance(result, EngineClosedError) and "stopped" in str(result) for result in results)
    assert isinstance(late, EngineClosedError)


def test_a_step_too_small_for_any_request_is_an_error_that_names_the_limit() -> None:
    class WholePrompts(FakeEngine):
        """Computes a prompt in one step or not at all."""

        def plan(self, limits: Any) -> StepPlan | None:
            plan = super().plan(limits)
            return None if plan is not None and plan.prefill and plan.num_tokens < 3 else plan

    async def work() -> list[Completion | BaseException]:
        async with EngineLoop(WholePrompts(WEIGHTS), max_step_tokens=2) as loop:
            return await settled(loop.generate(request(0)), loop.generate(request(1)))

    for result in run(work()):
        assert isinstance(result, EngineClosedError)
        assert "max_step_tokens=2" in str(result)
        assert "2 requests" in str(result)


async def turns(loop: EngineLoop[FakeWeights], number: int, between: Callable[[], Awaitable[None]]) -> None:
    """Three turns of one episode; `between` two of them the caller does something else."""
    prompt: tuple[int, ...] = (1, 2, 3)
    for turn in range(3):
        max_tokens = 1 + (number + turn) % 4
        completion = await loop.generate(request(10 * number + turn, max_tokens=max_tokens, prompt_token_ids=prompt))
        prompt += completion.token_ids
        await between()


def plans_of_six_callers(between: Callable[[], Awaitable[None]], *, max_slots: int, max_step_tokens: int = 16) -> list[StepPlan]:
    engine = RecordingEngine(max_slots=max_slots)

    async def work() -> None:
        async with EngineLoop(engine, max_step_tokens=max_step_tokens) as loop:
            await asyncio.gather(*(turns(loop, number, between) for number in range(6)))

    run(work())
    return engine.plans


def test_the_clock_has_no_part_in_what_shares_a_step() -> None:
    def dawdling(seed: int) -> Callable[[], Awaitable[None]]:
        rng = random.Random(seed)

        async def between() -> None:
            time.sleep(rng.random() * 3e-3)  # an environment that computes
            await asyncio.sleep(0)

        return between

    first = plans_of_six_callers(dawdling(0), max_slots=4)
    assert max(len(plan.decode) for plan in first) > 1
    assert plans_of_six_callers(dawdling(1), max_slots=4) == first


def test_callers_that_need_a_few_passes_of_the_event_loop_still_share_a_step() -> None:
    def dawdling(seed: int) -> Callable[[], Awaitable[None]]:
        rng = random.Random(seed)

        async def between() -> None:
            for _ in range(rng.randrange(QUIET_PASSES - 2)):
                await asyncio.sleep(0)

        return between

    def shared(seed: int) -> list[set[str]]:
        plans = plans_of_six_callers(dawdling(seed), max_slots=8, max_step_tokens=1000)  # room for all: order decides nothing
        return [{entry.request_id for entry in (*plan.prefill, *plan.decode)} for plan in plans]

    assert shared(1) == shared(2) == shared(3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_action_runs_between_two_steps_while_requests_are_in_flight(asynchronous: bool) -> None:
    engine = RecordingEngine(asynchronous=asynchronous)

    async def work() -> Completion:
        async with EngineLoop(engine, max_step_tokens=32) as loop:
            call = asyncio.ensure_future(loop.generate(request(0, max_tokens=30)))
            while loop.counters.num_steps < 4:
                await asyncio.sleep(0)
            await loop.between_steps(lambda: engine.commit(make_weights(seed=2, vocab_size=VOCAB_SIZE), version=8))
            return await call

    versions = run(work()).weight_versions
    assert set(versions) == {0, 8}
    assert list(versions) == sorted(versions)


def test_an_action_that_fails_is_its_callers_error_alone() -> None:
    def fail() -> None:
        raise OSError("the weights are gone")

    async def work() -> list[Completion | BaseException]:
        async with EngineLoop(RecordingEngine(), max_step_tokens=32) as loop:
            return await settled(loop.generate(request(0)), loop.between_steps(fail))  # type: ignore[arg-type]

    completion, error = run(work())
    assert isinstance(completion, Completion)
    assert isinstance(error, OSError)


def test_an_action_of_a_stopped_loop_is_refused() -> None:
    async def work() -> None:
        async with EngineLoop(RecordingEngine(), max_step_tokens=32) as loop:
            pass
        await loop.between_steps(lambda: None)

    with pytest.raises(EngineClosedError):
        run(work())
