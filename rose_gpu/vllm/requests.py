"""What of a request is particular to vLLM: which ones it cannot run, and stop strings, which it leaves to us."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from common.types import Request

Decode = Callable[[Sequence[int]], str]

MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, without a word where it counts."""


def why_not_on_vllm(request: Request, in_use: Container[str], *, can_decode: bool) -> str | None:
    """The reason why this engine cannot run a request that others could, or None."""
    params = request.sampling
    if request.request_id in in_use:
        return "the id is in use; ids must be unique"
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        return f"temperature={params.temperature}: vLLM would take {MIN_TEMPERATURE}; use 0 (greedy) or at least that"
    if params.stop_strings and not can_decode:
        return "it has stop strings, but this engine was built without `decode`; pass stop_token_ids"
    return None


def completes_stop_string(token_ids: Sequence[int], stop_strings: Sequence[str], decode: Decode) -> bool:
    """Whether the text holds a stop string that it did not hold before the newest token.

    Looks at the newest tokens only: each of them is at least a byte, so that many hold the longest stop string.
    """
    window = len(token_ids[-1:]) + max(len(stop.encode()) for stop in stop_strings)
    return any(stop in decode(token_ids[-window:]) for stop in stop_strings)
