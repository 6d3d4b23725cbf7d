"""Steps in flight, drain, close, and random schedules: whatever is called in whatever order, the contract holds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.types import FinishReason
from tests.conformance.driver import Driver, make_request, prompt
from tests.conformance.registry import MAX_SLOTS, EngineCase, Feature
from tests.conformance.test_engine_batching import assert_same


def test_an_idle_engine_plans_nothing_and_drains_nothing(driver: Driver) -> None:
    assert driver.submit() is None
    assert driver.drain() is None
    assert driver.drain() is None
    load = driver.engine.load()
    assert (load.running_requests, load.waiting_requests, load.used_cache_tokens) == (0, 0, 0)
    assert load.capacity_cache_tokens > 0


def test_collect_without_submit_fails_an_assertion(driver: Driver) -> None:
    with pytest.raises(AssertionError):
        driver.engine.collect()


def test_drain_brings_the_step_in_flight_and_then_nothing(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3), max_tokens=3))
    driver.submit()
    result = driver.drain()
    assert result is not None
    assert len(result.tokens) == 1
    assert driver.drain() is None
    assert len(driver.run()["r"].token_ids) == 3


def test_requests_may_arrive_and_load_be_read_while_a_step_is_in_flight(driver: Driver) -> None:
    driver.add(make_request("first", prompt(3)))
    driver.submit()
    driver.add(make_request("second", prompt(4, 1), trajectory_id=1))
    load = driver.engine.load()
    assert load.running_requests + load.waiting_requests >= 1
    driver.collect()
    assert set(driver.run()) == {"first", "second"}


def test_the_load_counts_running_and_waiting_requests_and_the_cache(driver: Driver) -> None:
    driver.add(*[make_request(f"r{idx}", prompt(6, idx), trajectory_id=idx, max_tokens=9) for idx in range(MAX_SLOTS + 2)])
    assert driver.engine.load().waiting_requests == MAX_SLOTS + 2
    driver.step_until_tokens(f"r{MAX_SLOTS - 1}", 1)
    load = driver.engine.load()
    assert load.running_requests + load.waiting_requests == len(driver.live)
    assert 0 < load.running_requests <= MAX_SLOTS
    assert 6 * load.running_requests <= load.used_cache_tokens <= load.capacity_cache_tokens
    driver.run()
    assert driver.engine.load().used_cache_tokens <= load.capacity_cache_tokens


def test_close_may_be_called_twice_and_with_requests_inside(engine_case: EngineCase) -> None:
    driver = Driver(engine_case.make())
    driver.add(make_request("r", prompt(3)))
    driver.step()
    driver.engine.close()
    driver.engine.close()


_OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 24), st.integers(1, 10), st.integers(0, 2)),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("step"), st.integers(1, 40)),
    st.tuples(st.just("abort"), st.integers(0, 30), st.booleans()),
    st.tuples(st.just("preempt"), st.integers(0, 30), st.booleans()),
)
_COMMITS = st.tuples(st.just("commit"), st.integers(0, 3))
_SCHEDULE = st.lists(_OPERATIONS, max_size=40)
_SCHEDULE_WITH_COMMITS = st.lists(st.one_of(_OPERATIONS, _OPERATIONS, _COMMITS), max_size=40)


def play(driver: Driver, case: EngineCase, schedule: list[tuple]) -> None:
    """Carry out a schedule and run to the end; the driver checks the contract at every step."""
    chunks = Feature.CHUNKED_PREFILL not in case.lacks
    num_added, version = 0, driver.engine.load().weight_version
    driver.completions.clear()
    for name, *args in schedule:
        match name:
            case "add":
                length, max_tokens, priority = args
                request = make_request(
                    f"s{num_added}",
                    prompt(length, num_added),
                    trajectory_id=num_added,
                    max_tokens=max_tokens,
                    priority=priority,
                    stop_token_ids=(3, 4),
                )
                driver.add(request)
                num_added += 1
            case "step":
                driver.step(args[0] if chunks else 40 + args[0])
            case "abort":
                in_flight = args[1] and driver.submit() is not None
                driver.engine.abort(f"s{args[0]}")
                if in_flight:
                    driver.collect()
            case "preempt":
                driver.engine.preempt(f"s{args[0]}", keep_cache=args[1])
            case "commit":
                driver.drain()
                version += 1
                driver.engine.commit(case.weights(args[0]), version=version)
    driver.run()
    assert len(driver.completions) == num_added


def test_every_request_ends_once_under_random_schedules_with_commits(engine_case: EngineCase, driver: Driver) -> None:
    @settings(
        max_examples=engine_case.num_random_schedules,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule=_SCHEDULE_WITH_COMMITS)
    def check(schedule: list[tuple]) -> None:
        play(driver, engine_case, schedule)

    check()


def test_random_schedules_change_no_token(engine_case: EngineCase, driver: Driver) -> None:
    @settings(
        max_examples=engine_case.num_random_schedules,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(schedule=_SCHEDULE)
    def check(schedule: list[tuple]) -> None:
        play(driver, engine_case, schedule)
        completions = dict(driver.completions)
        adds = [args for name, *args in schedule if name == "add"]
        for idx, (length, max_tokens, _) in enumerate(adds):
            request = make_request(f"s{idx}", prompt(length, idx), trajectory_id=idx, max_tokens=max_tokens, stop_token_ids=(3, 4))
            alone, completion = driver.run_alone(request), completions[f"s{idx}"]
            if completion.finish_reason is FinishReason.ABORTED:
                assert completion.token_ids == alone.token_ids[: len(completion.token_ids)]
            else:
                assert_same(completion, alone, engine_case)

    check()
