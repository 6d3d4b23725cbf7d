"""Being told to stop: once, everything under way finishes; twice, everything under way ends with an answer."""

from __future__ import annotations

import contextlib
import json

import pytest

from common.serving.front.access import Tokens
from common.transfer.secrets import Secret
from tests.common.serving.front.running import running_front
from tests.common.serving.front.three_calls import FIELDS, NUM_TOKENS, Calls


def test_the_first_stop_lets_everything_finish_and_refuses_what_comes() -> None:
    with running_front(step_s=0.005) as front, contextlib.closing(front.http()) as kept_open:
        kept_open.connect()
        calls = Calls(front)
        front.stop()
        front.wait_until(lambda: front.front.calls.draining)
        for connection in (front.http(), kept_open):
            connection.request("POST", "/v1/completions", json.dumps(FIELDS), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            response.read()
        outcomes = calls.join()
        assert (outcomes["whole"][0], outcomes["whole"][1]["usage"]["completion_tokens"]) == (200, NUM_TOKENS)
        assert outcomes["streamed"][-1] == "length"
        assert len(outcomes["rollout"][1]["token_ids"]) == NUM_TOKENS
        front.join()
        assert front.outcome is None


def test_the_second_stop_ends_everything_with_an_answer() -> None:
    with running_front(step_s=0.2) as front:
        calls = Calls(front)
        front.stop()
        front.stop()
        outcomes = calls.join()
        for name in ("whole", "rollout"):
            status, answer = outcomes[name]
            assert (status, "told to stop at once" in answer["error"]["message"]) == (503, True)
        assert "told to stop at once" in str(outcomes["streamed"])
        front.join()


def test_a_failed_engine_reaches_every_client_in_its_own_words_and_ends_the_server() -> None:
    with running_front(step_s=0.01) as front:
        calls = Calls(front)
        front.engine.fault = "the device is on fire"
        outcomes = calls.join()
        for name in ("whole", "rollout"):
            status, answer = outcomes[name]
            assert (status, "the device is on fire" in answer["error"]["message"]) == (503, True)
        assert "the device is on fire" in str(outcomes["streamed"])
        front.join()
        assert "the device is on fire" in (front.outcome or "")


def test_an_address_that_others_can_reach_wants_tokens() -> None:
    with pytest.raises(ValueError, match="--online_token"):
        Tokens().check_address("0.0.0.0")
    Tokens().check_address("127.0.0.1")
    Tokens(online=[Secret(b"x" * 20, "test")]).check_address("0.0.0.0")
