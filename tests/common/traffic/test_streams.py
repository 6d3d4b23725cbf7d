"""Rollout streams: each asks for one thing at a time, grows its context by what it got, and starts over at the end."""

from __future__ import annotations

from common.traffic.streams import RolloutStreams, TrajectoryLengths
from common.types import Completion, FinishReason, Request

LENGTHS = (TrajectoryLengths(prompt_tokens=5, turn_tokens=(2, 2, 2), new_tokens=3),)


def answered(request: Request, *, num_tokens: int = 2) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=(7,) * num_tokens,
        behavior_logprobs=(0.0,) * num_tokens,
        weight_versions=(0,) * num_tokens,
        finish_reason=FinishReason.LENGTH,
    )


def test_a_turns_prompt_is_the_last_one_its_answer_and_new_tokens() -> None:
    streams = RolloutStreams(2, LENGTHS, vocab_size=50, seed=0)
    first, other = streams.start()
    second = streams.next(answered(first))
    assert second.prompt_token_ids[: 5 + 2] == (*first.prompt_token_ids, 7, 7)
    assert len(second.prompt_token_ids) == 5 + 2 + 3
    assert (second.key.trajectory_id, second.key.turn_idx) == (first.key.trajectory_id, 1)
    assert other.key.trajectory_id != first.key.trajectory_id
    assert LENGTHS[0].context_tokens == 5 + 3 * 2 + 2 * 3


def test_after_its_last_turn_or_an_abort_a_stream_begins_another_trajectory() -> None:
    streams = RolloutStreams(1, LENGTHS, vocab_size=50, seed=0)
    (request,) = streams.start()
    trajectory_id = request.key.trajectory_id
    for _ in range(3):
        request = streams.next(answered(request))
    assert (request.key.turn_idx, len(request.prompt_token_ids)) == (0, 5)
    assert request.key.trajectory_id != trajectory_id
    again = streams.next(answered(request, num_tokens=1))
    assert again.key.turn_idx == 0
    assert streams.generated_tokens == 3 * 2 + 1


def test_the_same_seed_asks_for_the_same() -> None:
    runs = []
    for _ in range(2):
        streams = RolloutStreams(3, LENGTHS, vocab_size=50, seed=4)
        requests = streams.start()
        runs.append([*requests, *[streams.next(answered(request)) for request in requests]])
    assert runs[0] == runs[1]
