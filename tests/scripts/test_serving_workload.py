"""The workload that serving engines are compared on, and that our client serves exactly it."""

from __future__ import annotations

from scripts.serving_clients import OurLoop
from scripts.serving_workload import ClosedLoop
from tests.rose_jax.jetstream.serving_data import MODEL, SMALL, VOCAB_SIZE, params


def workload(*, grow: bool, seed: int = 0) -> ClosedLoop:
    return ClosedLoop(
        streams=3,
        turns=4,
        shared_tokens=5,
        new_tokens=6,
        max_tokens=3,
        vocab_size=VOCAB_SIZE,
        grow=grow,
        seed=seed,
    )


def test_a_growing_stream_asks_with_all_that_was_said_before() -> None:
    work = workload(grow=True)
    (first, *others) = work.start()
    assert all(other.token_ids[:5] == first.token_ids[:5] for other in others)
    assert len({prompt.token_ids for prompt in (first, *others)}) == 3
    for answer in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        following = work.answered(0, answer)
        assert following is not None
        said = (*first.token_ids, *answer)
        assert following.token_ids[: len(said)] == said
        assert len(following.token_ids) == len(said) + 6
        first = following
    assert work.answered(0, [1, 2, 3]) is None


def test_a_stream_that_does_not_grow_asks_anew_and_equal_seeds_ask_the_same() -> None:
    work, again = workload(grow=False), workload(grow=False)
    firsts = work.start()
    assert firsts == again.start() != workload(grow=False, seed=1).start()
    following = work.answered(1, [9, 9, 9])
    assert following == again.answered(1, [8])
    assert following is not None
    assert len(following.token_ids) == 11
    assert following.token_ids[:5] == firsts[1].token_ids[:5]


def test_our_loop_generates_every_token_asked_for_and_times_it() -> None:
    for tokens_per_sequence in (1, 8):
        client = OurLoop(SMALL, MODEL, params(), tokens_per_sequence=tokens_per_sequence)
        timings = client.run(workload(grow=True))
        assert [timing.num_tokens for timing in timings] == [3] * 12
        assert all(timing.sent_s <= timing.first_token_s for timing in timings)
        client.close()
