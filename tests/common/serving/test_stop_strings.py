"""A stop string counts with the token that completes it, and costs no more to look for in a long text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.serving.stop_strings import completes_stop_string

WORDS = ("a", "bc", "é", " stop", "")


def decode(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token_id] for token_id in token_ids)


@pytest.mark.parametrize(
    ("token_ids", "stop_strings", "expected"),
    [
        ([0], ("a",), True),
        ([0, 1], ("ab",), True),
        ([1, 0, 1], ("cabc", "x"), True),
        ([2, 2, 2], ("ééé",), True),
        ([3], ("to",), True),
        ([0, 0], ("aaa",), False),
        ([0, 1, 0], ("z", "b a"), False),
    ],
)
def test_a_stop_string_is_found_with_the_token_that_completes_it(token_ids: list[int], stop_strings: tuple, expected: bool) -> None:
    assert completes_stop_string(token_ids, stop_strings, decode) is expected


def test_only_as_many_tokens_are_decoded_as_the_longest_stop_string_can_span() -> None:
    seen: list[int] = []

    def count(token_ids: Sequence[int]) -> str:
        seen.append(len(token_ids))
        return decode(token_ids)

    assert not completes_stop_string([0] * 10_000, ("é!", "x"), count)
    assert seen == [1 + 3]
