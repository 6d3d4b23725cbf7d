"""Two engines of a kind on one device under the executor: neither changes what the other generates, and commits stay whole."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.clock import MonotonicClock
from common.serving.coserving.admission import AdmissionController
from common.serving.coserving.calibration import calibrate
from common.serving.coserving.device import Parkable
from common.serving.coserving.events import Side
from common.serving.coserving.executor import CoServingExecutor
from common.serving.coserving.objectives import Objective, Objectives
from common.serving.coserving.step_time import StepFeatures
from common.serving.engine import StepEngine, StepLimits
from common.types import Completion, Request
from tests.conformance.driver import Driver, make_request, prompt
from tests.conformance.registry import EngineCase
from tests.conformance.test_engine_batching import assert_same

MAX_STEP_TOKENS = 64
NUM_REQUESTS = 6
GENEROUS = Objectives.of("serving", Objective(ttft_s=20.0, tpot_s=5.0))


def requests(side: Side) -> list[Request]:
    return [
        make_request(f"{side}{idx}", prompt(3 + 2 * idx, idx), trajectory_id=100 * list(Side).index(side) + idx, max_tokens=9)
        for idx in range(NUM_REQUESTS)
    ]


async def serve_both(engines: dict[Side, StepEngine[Any]], case: EngineCase) -> tuple[dict[str, Completion], CoServingExecutor]:
    """All requests of both sides at once, with a commit of rollout weights in the middle of another round of them."""
    longest = StepFeatures(prefill_tokens=MAX_STEP_TOKENS, decode_tokens=4, context_tokens=256)
    policy = AdmissionController(GENEROUS, longest_serving_step=longest)
    limits = dict.fromkeys(Side, StepLimits(max_tokens=MAX_STEP_TOKENS))
    calibrate(engines, policy, MonotonicClock(), limits=limits)
    executor = CoServingExecutor(policy, serving_model="serving")
    loops = {side: executor.drive(side)(engine, max_step_tokens=MAX_STEP_TOKENS) for side, engine in engines.items()}
    async with executor:
        calls = [loops[side].generate(request) for side in Side for request in requests(side)]
        done = {completion.request_id: completion for completion in await asyncio.gather(*calls)}
        during = [asyncio.ensure_future(loops[side].generate(request)) for side in Side for request in requests(side)]
        await asyncio.sleep(0)
        await loops[Side.ROLLOUT].between_steps(lambda: engines[Side.ROLLOUT].commit(case.weights(1), version=1))
        for completion in await asyncio.gather(*during):
            side = Side.ROLLOUT if completion.request_id.startswith(Side.ROLLOUT) else Side.SERVING
            versions = completion.weight_versions
            assert len(versions) == 9
            assert sorted(versions) == list(versions)  # old ones, then new ones
            assert side is Side.ROLLOUT or set(versions) == {0}
        return done, executor


def test_two_engines_on_one_device_generate_what_each_generates_alone(engine_case: EngineCase, driver: Driver) -> None:
    alone = {request.request_id: driver.run_alone(request) for side in Side for request in requests(side)}
    engines = {side: engine_case.make() for side in Side}
    try:
        together, executor = asyncio.run(asyncio.wait_for(serve_both(engines, engine_case), 300))
        for request_id, completion in together.items():
            assert_same(completion, alone[request_id], engine_case)
        assert engines[Side.ROLLOUT].load().weight_version == 1
        assert engines[Side.SERVING].load().weight_version == 0
        assert all(executor.device.num_live(side) == 0 for side in Side)
    finally:
        for engine in engines.values():
            engine.close()


def test_a_parked_engine_generates_what_it_did_and_takes_new_weights_afterwards(engine_case: EngineCase, driver: Driver) -> None:
    engine = driver.engine
    if not isinstance(engine, Parkable):
        pytest.skip("the engine's memory stays where it is")
    request = make_request("r", prompt(20, salt=31), max_tokens=6)
    before = driver.run_alone(request)
    for _ in range(2):
        for work in (engine.park, engine.activate):
            for _ in work():
                pass
        after = driver.run_alone(request)
        assert after.cached_prompt_tokens == 0, "a parked engine has no cache"
        assert_same(after, before, engine_case)
    engine.commit(engine_case.weights(1), version=1)
    other = make_request("r", prompt(20, salt=33), max_tokens=6)  # of which no cache was kept from the old weights
    changed = driver.run_alone(other)
    for work in (engine.park, engine.activate):
        for _ in work():
            pass
    assert_same(driver.run_alone(other), changed, engine_case)


def test_an_engine_that_holds_requests_is_not_parked(engine_case: EngineCase, driver: Driver) -> None:
    engine = driver.engine
    if not isinstance(engine, Parkable):
        pytest.skip("the engine's memory stays where it is")
    request = make_request("r", prompt(5, salt=32), max_tokens=6)
    driver.add(request)
    with pytest.raises(ValueError, match="1 requests are live"):
        next(iter(engine.park()), None)
    assert len(driver.run()["r"].token_ids) == 6
