"""Every accepted request ends exactly once, for the right reason; a rejected one fails alone."""

from __future__ import annotations

import dataclasses

import pytest

from common.errors import RequestRejectedError
from common.types import FinishReason, Request
from tests.conformance.driver import Driver, make_request, prompt
from tests.conformance.registry import MAX_CONTEXT_TOKENS, MAX_SLOTS, EngineCase, Feature


def test_max_tokens_counts_sampled_tokens(driver: Driver) -> None:
    for max_tokens in (1, 2, 9):
        completion = driver.run_alone(make_request("r", prompt(4), max_tokens=max_tokens))
        assert len(completion.token_ids) == max_tokens
        assert completion.finish_reason is FinishReason.LENGTH


def test_prompt_and_completion_may_fill_the_whole_context(driver: Driver) -> None:
    completion = driver.run_alone(make_request("r", prompt(MAX_CONTEXT_TOKENS - 6), max_tokens=6))
    assert len(completion.token_ids) == 6
    longest = driver.run_alone(make_request("r", prompt(1), max_tokens=MAX_CONTEXT_TOKENS - 1))
    assert len(longest.token_ids) == MAX_CONTEXT_TOKENS - 1


@pytest.mark.parametrize("stop_idx", [0, 3, 7])
def test_a_stop_token_ends_the_request_and_is_its_last_token(driver: Driver, stop_idx: int) -> None:
    free = driver.run_alone(make_request("r", prompt(6), max_tokens=8)).token_ids
    end = free.index(free[stop_idx]) + 1
    unused = next(token_id for token_id in range(driver.engine.info.vocab_size) if token_id not in free)
    stopped = driver.run_alone(make_request("r", prompt(6), max_tokens=8, stop_token_ids=(unused, free[stop_idx])))
    assert stopped.token_ids == free[:end]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_string_that_spans_tokens_ends_the_request(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.STOP_STRINGS)
    assert engine_case.token_text is not None
    free = driver.run_alone(make_request("r", prompt(6), max_tokens=8)).token_ids
    texts = [engine_case.token_text(token_id) for token_id in free]
    stop = "".join(texts)[: len("".join(texts[:4]))][-(len(texts[3]) + 1) :]  # ends token 3, begins within token 2
    ends = next(idx for idx in range(8) if stop in "".join(texts[: idx + 1]))
    stopped = driver.run_alone(make_request("r", prompt(6), max_tokens=8, stop_strings=(stop,)))
    assert stopped.token_ids == free[: ends + 1]
    assert stopped.finish_reason is FinishReason.STOP
    assert len(driver.run_alone(make_request("r", prompt(6), max_tokens=8, stop_strings=("0",))).token_ids) == 8


def test_abort_of_a_running_request_returns_its_tokens_so_far(driver: Driver) -> None:
    request = make_request("r", prompt(5), max_tokens=20)
    whole = driver.run_alone(request).token_ids
    driver.add(request, make_request("other", prompt(3, 1), trajectory_id=1, max_tokens=20))
    driver.step_until_tokens("r", 4)
    driver.engine.abort("r")
    driver.run()
    aborted = driver.completions["r"]
    assert aborted.finish_reason is FinishReason.ABORTED
    assert len(aborted.token_ids) >= 4
    assert aborted.token_ids == whole[: len(aborted.token_ids)]
    assert driver.completions["other"].finish_reason is FinishReason.LENGTH


def test_an_abort_is_answered_by_the_next_result(driver: Driver) -> None:
    driver.add(make_request("r", prompt(5), max_tokens=20))
    driver.step_until_tokens("r", 2)
    driver.engine.abort("r")
    driver.step()
    assert driver.completions["r"].finish_reason is FinishReason.ABORTED


def test_abort_of_a_waiting_request_brings_an_empty_completion(driver: Driver) -> None:
    driver.add(*[make_request(f"r{idx}", prompt(3, idx), trajectory_id=idx, max_tokens=6) for idx in range(MAX_SLOTS + 1)])
    driver.step()
    driver.engine.abort(f"r{MAX_SLOTS}")
    driver.run()
    waiting = driver.completions[f"r{MAX_SLOTS}"]
    assert waiting.finish_reason is FinishReason.ABORTED
    assert waiting.token_ids == ()


def test_abort_before_the_first_step_is_answered_without_one(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3)))
    driver.engine.abort("r")
    driver.run()
    assert driver.completions["r"].finish_reason is FinishReason.ABORTED


def test_abort_between_submit_and_collect_ends_the_request_once(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3), max_tokens=10), make_request("other", prompt(4, 1), trajectory_id=1))
    driver.step_until_tokens("r", 2)
    driver.submit()
    driver.engine.abort("r")
    driver.collect()
    driver.run()
    assert driver.completions["r"].finish_reason is FinishReason.ABORTED
    assert 2 <= len(driver.completions["r"].token_ids) <= 3
    assert driver.completions["other"].finish_reason is FinishReason.LENGTH


def test_abort_of_the_last_token_in_flight_still_ends_once(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3), max_tokens=1))
    driver.submit()
    driver.engine.abort("r")
    driver.collect()
    driver.run()
    assert driver.completions["r"].finish_reason in (FinishReason.ABORTED, FinishReason.LENGTH)


def test_abort_of_an_unknown_or_ended_request_changes_nothing(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3)))
    driver.engine.abort("nobody")
    driver.run()
    driver.engine.abort("r")
    assert driver.step() is None


def test_aborting_twice_ends_once(driver: Driver) -> None:
    driver.add(make_request("r", prompt(3), max_tokens=10))
    driver.step_until_tokens("r", 1)
    driver.engine.abort("r")
    driver.engine.abort("r")
    driver.run()


def test_an_aborted_request_gives_its_slot_to_a_waiting_one(driver: Driver) -> None:
    driver.add(*[make_request(f"r{idx}", prompt(3, idx), trajectory_id=idx, max_tokens=20) for idx in range(MAX_SLOTS)])
    driver.step_until_tokens(f"r{MAX_SLOTS - 1}", 1)
    driver.add(make_request("next", prompt(3, 9), trajectory_id=9, max_tokens=2))
    driver.engine.abort("r0")
    while "next" in driver.live:
        driver.step()
    assert set(driver.live) == {f"r{idx}" for idx in range(1, MAX_SLOTS)}
    driver.run()


def bad_requests(vocab_size: int) -> dict[str, Request]:
    good = make_request("bad", prompt(3))
    return {
        "empty": dataclasses.replace(good, prompt_token_ids=()),
        "unknown token": dataclasses.replace(good, prompt_token_ids=(1, vocab_size)),
        "negative token": dataclasses.replace(good, prompt_token_ids=(1, -1)),
        "prompt fills the context": dataclasses.replace(good, prompt_token_ids=prompt(MAX_CONTEXT_TOKENS)),
        "prompt and completion exceed the context": make_request("bad", prompt(60), max_tokens=5),
        "prompt far too long": dataclasses.replace(good, prompt_token_ids=prompt(50 * MAX_CONTEXT_TOKENS)),
    }


@pytest.mark.parametrize("fault", sorted(bad_requests(0)))
def test_a_request_that_can_never_run_is_rejected_alone(engine_case: EngineCase, driver: Driver, fault: str) -> None:
    good = make_request("good", prompt(5), max_tokens=10)
    expected = driver.run_alone(good)
    driver.add(good)
    driver.step_until_tokens("good", 2)
    load = driver.engine.load()
    with pytest.raises(RequestRejectedError, match="bad"):
        driver.engine.add(bad_requests(driver.engine.info.vocab_size)[fault])
    assert driver.engine.load() == load
    assert driver.run()["good"].token_ids == expected.token_ids
    assert driver.run_alone(make_request("bad", prompt(3)), request_id="bad").finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": -0.1},
        {"num_top_logprobs": -1},
        {"stop_strings": ("",)},
    ],
    ids=str,
)
def test_sampling_options_out_of_range_are_rejected(engine_case: EngineCase, driver: Driver, options: dict) -> None:
    engine_case.needs(Feature.REQUEST_CHECKS)
    with pytest.raises(RequestRejectedError, match="bad"):
        driver.engine.add(make_request("bad", prompt(3), **options))
    assert driver.step() is None


def test_an_id_in_use_is_rejected_and_free_again_after_the_end(engine_case: EngineCase, driver: Driver) -> None:
    engine_case.needs(Feature.REQUEST_CHECKS)
    driver.add(make_request("r", prompt(3), max_tokens=4))
    with pytest.raises(RequestRejectedError, match="r"):
        driver.engine.add(make_request("r", prompt(4)))
    assert len(driver.run()["r"].token_ids) == 4
    driver.add(make_request("r", prompt(3), max_tokens=2))
    assert len(driver.run()["r"].token_ids) == 2
