"""Whatever happens to a call, its client gets exactly one end of it, and no other call notices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from common.serving.engine import StepResult
from common.serving.front import app as app_module
from common.serving.front.app import BodyLimits
from common.serving.front.front import ONLINE_PRIORITY
from common.transfer.store.directory import DirectoryStore
from common.types import Completion, FinishReason
from tests.common.serving.front.running import CONTROL_TOKEN, ROLLOUT_TOKEN, RunningFront, publish, running_front
from tests.common.serving.front.three_calls import FIELDS, NUM_TOKENS, Calls

TURN = {
    "call_id": "turn-0001",
    "prompt_token_ids": [1, 2, 3],
    "sampling": {"max_tokens": NUM_TOKENS},
    "key": {"run_seed": 3, "trajectory_id": 1, "turn_idx": 0},
}


def change_completions(front: RunningFront, change: Callable[[Completion], Completion]) -> None:
    """From now on the engine ends its requests so."""
    collect = front.engine.collect

    def changed() -> StepResult:
        result = collect()
        return dataclasses.replace(result, completions=tuple(map(change, result.completions)))

    front.engine.collect = changed  # type: ignore[method-assign]


def test_what_the_engine_gives_up_ends_for_its_client_too() -> None:
    with running_front(step_s=0.01) as front:
        calls = Calls(front)
        for request_id in list(front.engine._live):
            front._loop.call_soon_threadsafe(front.engine.abort, request_id)
        outcomes = calls.join()
        status, answer = outcomes["whole"]
        assert (status, answer["error"]["code"]) == (503, "service_unavailable")
        assert isinstance(outcomes["streamed"], openai.APIError)
        assert "aborted" in str(outcomes["streamed"])
        status, answer = outcomes["rollout"]
        assert (status, answer["finish_reason"]) == (200, "aborted")
        assert len(answer["token_ids"]) == len(answer["weight_versions"]) < NUM_TOKENS
        front.wait_until(front.is_idle)
        assert front.ask("/v1/completions", FIELDS)[0] == 200


@pytest.mark.parametrize(
    ("error", "words"), [("request 7: its logits are not finite", "logits are not finite"), (None, "no reason")]
)
def test_one_completion_that_fails_is_told_and_the_others_go_on(error: str | None, words: str) -> None:
    with running_front(step_s=0.005) as front:
        calls = Calls(front)
        online = {name for name, live in front.engine._live.items() if live.request.priority == ONLINE_PRIORITY}

        def fail_online(completion: Completion) -> Completion:
            if completion.request_id not in online:
                return completion
            return dataclasses.replace(completion, finish_reason=FinishReason.ERROR, error=error)

        change_completions(front, fail_online)
        outcomes = calls.join()
        status, answer = outcomes["whole"]
        assert (status, answer["error"]["code"]) == (500, "completion_failed")
        assert words in answer["error"]["message"]
        assert words in str(outcomes["streamed"])
        assert (outcomes["rollout"][0], len(outcomes["rollout"][1]["token_ids"])) == (200, NUM_TOKENS)
        assert front.ask("/health")[0] == 200


def test_a_turn_during_which_the_weights_change_says_which_token_is_of_which_version(tmp_path: Path) -> None:
    publish(DirectoryStore(tmp_path), 4)
    with running_front(step_s=0.005) as front:
        outcome: dict[str, Any] = {}
        call = threading.Thread(target=lambda: outcome.update(answer=front.ask("/rollout/v1/generate", TURN, token=ROLLOUT_TOKEN)))
        call.start()
        front.wait_until(lambda: front.engine.load().running_requests == 1)
        assert front.ask("/control/v1/stage", {"store": str(tmp_path)}, token=CONTROL_TOKEN)[0] == 200
        assert front.ask("/control/v1/commit", method="POST", token=CONTROL_TOKEN) == (200, {"version": 4})
        call.join()
        status, answer = outcome["answer"]
        versions = answer["weight_versions"]
        assert (status, answer["finish_reason"], len(versions)) == (200, "length", NUM_TOKENS)
        assert versions == sorted(versions)
        assert set(versions) == {0, 4}


def test_a_second_attempt_outlives_the_first_and_nothing_is_sampled_twice() -> None:
    with running_front(step_s=0.005) as front:
        first = front.http()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ROLLOUT_TOKEN}"}
        first.request("POST", "/rollout/v1/generate", json.dumps(TURN), headers)
        front.wait_until(lambda: front.engine.load().running_requests == 1)
        outcome: dict[str, Any] = {}
        again = threading.Thread(target=lambda: outcome.update(answer=front.ask("/rollout/v1/generate", TURN, token=ROLLOUT_TOKEN)))
        again.start()
        front.wait_until(lambda: sum(front.front.concurrency._under_way.values()) == 2)
        first.close()
        again.join()
        status, answer = outcome["answer"]
        assert (status, answer["finish_reason"], len(answer["token_ids"])) == (200, "length", NUM_TOKENS)
        late = front.ask("/rollout/v1/generate", TURN, token=ROLLOUT_TOKEN)
        assert late == (200, answer)
        status, report = front.ask("/control/v1/status", token=CONTROL_TOKEN)
        assert (status, report["counters"]["sampled_tokens"]) == (200, NUM_TOKENS)


def test_a_call_id_that_is_used_for_another_turn_gets_that_turn() -> None:
    with running_front() as front:
        answers = [
            front.ask("/rollout/v1/generate", TURN | {"prompt_token_ids": prompt}, token=ROLLOUT_TOKEN)
            for prompt in ([1, 2, 3], [7, 8], [1, 2, 3])
        ]
        assert [status for status, _ in answers] == [200, 200, 200]
        assert answers[0] == answers[2] != answers[1]


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "BodyLimits", functools.partial(BodyLimits, timeout_s=0.2))
    with running_front() as front:
        for path in ("/v1/completions", "/rollout/v1/generate"):
            with socket.create_connection(("127.0.0.1", front.port), timeout=60) as slow:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
                slow.sendall(head.encode() + b'{"model": ')
                answer = slow.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 408 ")
            with contextlib.closing(front.http()) as other:
                other.request("GET", "/health")
                assert other.getresponse().status == 200
