"""Rollouts and control over HTTP: what a trajectory needs comes back, attempts can be repeated, weights come from a store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from common.serving.front.repeatable import RepeatableCalls
from common.transfer.store.directory import DirectoryStore
from common.types import Request, SamplingKey, SamplingParams
from tests.common.serving.front.running import CONTROL_TOKEN, MODEL, ROLLOUT_TOKEN, RunningFront, alone, publish, running_front


@pytest.fixture
def front() -> Iterator[RunningFront]:
    with running_front() as running:
        yield running


def turn(call_id: str = "call-0001", *, max_tokens: int = 12, **fields: Any) -> dict[str, Any]:
    return {
        "call_id": call_id,
        "request_id": "r7",
        "prompt_token_ids": list(range(5, 40)),
        "sampling": {"max_tokens": max_tokens, "num_top_logprobs": 2},
        "key": {"run_seed": 3, "trajectory_id": 1, "turn_idx": 0},
        **fields,
    }


def generate(front: RunningFront, body: dict[str, Any]) -> tuple[int, Any]:
    return front.ask("/rollout/v1/generate", body, token=ROLLOUT_TOKEN)


def control(front: RunningFront, what: str, body: object = None, *, method: str = "POST") -> tuple[int, Any]:
    return front.ask(f"/control/v1/{what}", body, method=method, token=CONTROL_TOKEN)


def test_a_turn_is_what_the_engine_gives_alone(front: RunningFront) -> None:
    status, answer = generate(front, turn())
    expected = alone(
        Request(
            request_id="r7",
            prompt_token_ids=tuple(range(5, 40)),
            sampling=SamplingParams(max_tokens=12, num_top_logprobs=2),
            key=SamplingKey(run_seed=3, trajectory_id=1, turn_idx=0),
        )
    )
    assert status == 200
    assert answer == {
        "request_id": "r7",
        "token_ids": list(expected.token_ids),
        "behavior_logprobs": list(expected.behavior_logprobs),
        "weight_versions": [0] * 12,
        "finish_reason": "length",
        "cached_prompt_tokens": 0,
        "top_logprobs": [[list(pair) for pair in top] for top in expected.top_logprobs],
        "error": None,
    }


def test_a_repeated_attempt_gets_the_first_ones_answer_and_samples_nothing(front: RunningFront) -> None:
    first = generate(front, turn())
    sampled = control(front, "status", method="GET")[1]["counters"]["sampled_tokens"]
    assert generate(front, turn()) == first
    assert control(front, "status", method="GET")[1]["counters"]["sampled_tokens"] == sampled
    generate(front, turn("call-0002"))
    assert control(front, "status", method="GET")[1]["counters"]["sampled_tokens"] > sampled


def test_attempts_at_the_same_time_share_one_execution() -> None:
    async def work() -> None:
        calls: RepeatableCalls[int] = RepeatableCalls(lambda _: 1, max_kept=2)
        started: list[int] = []
        gate = asyncio.Event()

        async def execute() -> int:
            started.append(1)
            await gate.wait()
            return len(started)

        attempts = [asyncio.create_task(calls.run("a", execute)) for _ in range(3)]
        await asyncio.sleep(0)
        attempts[0].cancel()  # its client is gone; the others still wait
        gate.set()
        assert await asyncio.gather(*attempts[1:]) == [1, 1]
        assert await calls.run("a", execute) == 1
        for key in "bcd":
            await calls.run(key, execute)
        assert await calls.run("a", execute) == 5, "an answer that is no longer kept is made afresh"

    asyncio.run(work())


def test_answers_are_dropped_by_their_size_also_while_an_older_call_is_under_way() -> None:
    async def work() -> None:
        calls: RepeatableCalls[int] = RepeatableCalls(lambda size: size, max_kept=10)
        num_made = 0

        async def make(size: int) -> int:
            nonlocal num_made
            num_made += 1
            return size

        gate = asyncio.Event()

        async def wait() -> int:
            await gate.wait()
            return 100

        long_one = asyncio.create_task(calls.run("long", wait))
        await asyncio.sleep(0)
        for key in range(1000):
            assert await calls.run(key, lambda: make(5)) == 5
        assert set(calls._calls) == {"long", 998, 999}
        assert await calls.run(998, lambda: make(5)) == 5
        assert num_made == 1000
        await calls.run(1000, lambda: make(5))
        assert set(calls._calls) == {"long", 998, 1000}, "what was asked for again is the newest"
        gate.set()
        assert await long_one == 100
        assert not calls._calls, "one that is larger than all that may be kept is not kept"
        assert calls._kept_size == 0

    asyncio.run(work())


def test_a_call_nobody_waits_for_is_cancelled_and_one_that_failed_can_be_repeated() -> None:
    async def work() -> None:
        calls: RepeatableCalls[int] = RepeatableCalls(lambda _: 1, max_kept=2)
        outcomes: list[str] = []

        async def endless() -> int:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                outcomes.append("cancelled")
                raise
            return 0

        async def fails() -> int:
            raise ValueError("not this time")

        async def works() -> int:
            return 7

        attempt = asyncio.create_task(calls.run("a", endless))
        await asyncio.sleep(0.01)
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)
        await asyncio.sleep(0)
        assert outcomes == ["cancelled"]
        with pytest.raises(ValueError, match="not this time"):
            await calls.run("a", fails)
        assert await calls.run("a", works) == 7

    asyncio.run(work())


def test_rollouts_and_online_callers_share_no_cached_prefix(front: RunningFront) -> None:
    body = turn()
    online = {"model": MODEL, "prompt": body["prompt_token_ids"], "max_tokens": 2}
    assert generate(front, body)[1]["cached_prompt_tokens"] == 0
    assert front.ask("/v1/completions", online)[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert generate(front, turn("call-0002"))[1]["cached_prompt_tokens"] > 0
    assert generate(front, turn("call-0003", cache_namespace="other"))[1]["cached_prompt_tokens"] == 0
    assert generate(front, turn("call-0004", cache_namespace="online"))[1]["cached_prompt_tokens"] == 0


def test_each_interface_wants_its_own_token(front: RunningFront) -> None:
    assert front.ask("/rollout/v1/generate", turn(), token=CONTROL_TOKEN)[0] == 401
    assert front.ask("/rollout/v1/generate", turn())[0] == 401
    assert front.ask("/control/v1/status", token=ROLLOUT_TOKEN)[0] == 401
    assert control(front, "status", method="GET")[0] == 200


def test_a_replica_with_a_device_of_its_own_has_no_decisions_to_show(front: RunningFront) -> None:
    status, answer = control(front, "decisions", method="GET")
    assert status == 400
    assert "--coserve" in answer["error"]["message"]


def test_weights_are_staged_and_committed_from_the_store_that_is_named(front: RunningFront, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    publish(store, 4)
    before = control(front, "digests", method="GET")[1]["digests"]
    status, report = control(front, "stage", {"store": str(tmp_path)})
    assert (status, report["version"]) == (200, 4)
    assert control(front, "digests", method="GET")[1]["digests"] == before, "staging changes nothing"
    assert set(generate(front, turn())[1]["weight_versions"]) == {0}
    assert control(front, "commit") == (200, {"version": 4})
    assert set(generate(front, turn("call-0002"))[1]["weight_versions"]) == {4}
    digests = control(front, "digests", method="GET")[1]["digests"]
    engine_weights = front.engine._weights
    assert digests == {name: xxhash.xxh3_128_hexdigest(value.tobytes()) for name, value in engine_weights.items()}
    assert control(front, "stage", {})[1]["version"] == 4
    assert control(front, "commit") == (200, {"version": 4})


def test_a_store_that_brings_nothing_is_an_error_of_its_own_and_is_forgotten(front: RunningFront, tmp_path: Path) -> None:
    status, answer = control(front, "stage", {"store": str(tmp_path)})
    assert (status, answer["error"]["code"]) == (424, "VersionGoneError")
    assert control(front, "stage", {})[1]["version"] == 0
    assert control(front, "status", method="GET")[1]["load"]["weight_version"] == 0


def test_a_folder_that_is_not_there_is_refused_and_not_made(front: RunningFront, tmp_path: Path) -> None:
    for missing in (tmp_path / "typo", tmp_path / ("x" * 1000), Path("\0")):
        status, answer = control(front, "stage", {"store": str(missing)})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        assert "store" in answer["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_draining_lets_what_runs_finish_and_refuses_the_rest_until_resumed() -> None:
    with running_front(step_s=0.01) as front:
        answers: list[tuple[int, Any]] = []
        running = threading.Thread(target=lambda: answers.append(generate(front, turn(max_tokens=60))))
        running.start()
        front.wait_until(lambda: front.engine.load().running_requests == 1)
        assert control(front, "drain") == (200, {"draining": True})
        running.join()
        assert (answers[0][0], len(answers[0][1]["token_ids"])) == (200, 60)
        assert generate(front, turn("call-0002"))[0] == 503
        assert front.ask("/v1/completions", {"model": MODEL, "prompt": "go"})[0] == 503
        assert front.ask("/health")[0] == 503
        assert control(front, "resume") == (200, {"draining": False})
        assert generate(front, turn("call-0003"))[0] == 200
        assert front.ask("/health") == (200, {"status": "ok", "weight_version": 0})


def test_what_a_turn_may_not_be_is_refused_by_name(front: RunningFront) -> None:
    for fields, name in (
        ({"prompt_token_ids": []}, "prompt_token_ids"),
        ({"call_id": "a b"}, "call_id"),
        ({"colour": "red"}, "colour"),
        ({"key": {"run_seed": -1, "trajectory_id": 0, "turn_idx": 0}}, "key"),
    ):
        status, answer = generate(front, turn() | fields)
        assert (status, answer["error"]["param"]) == (400, name)
    status, answer = generate(front, turn(max_tokens=10_000))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
