"""Stop strings for engines that sample token ids: whether the text of the newest tokens completes one.

Knows no tokenizer; the caller brings `decode` and handles its failures. Refuses nothing: `rejection` has refused empty strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""


def completes_stop_string(token_ids: Sequence[int], stop_strings: Sequence[str], decode: Decode) -> bool:
    """Whether the text holds a stop string that it did not hold before the newest token.

    Looks at the newest tokens only: each of them is at least a byte, so that many hold the longest stop string.
    """
    window = 1 + max(len(stop.encode()) for stop in stop_strings)
    text = decode(token_ids[-window:])
    return any(stop in text for stop in stop_strings)
