"""What of a request is particular to vLLM: which ones it cannot run."""

from __future__ import annotations

from collections.abc import Container

from common.types import Request

MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, without a word where it counts."""
MAX_TEMPERATURE = 2.0
"""vLLM refuses higher ones, in a worker group only after the request was taken."""


def why_not_on_vllm(request: Request, in_use: Container[str], *, can_decode: bool) -> str | None:
    """The reason why this engine cannot run a request that others could, or None."""
    params = request.sampling
    if request.request_id in in_use:
        return "the id is in use; ids must be unique"
    if 0.0 < params.temperature < MIN_TEMPERATURE:
        return f"temperature={params.temperature}: vLLM would take {MIN_TEMPERATURE}; use 0 (greedy) or at least that"
    if params.temperature > MAX_TEMPERATURE:
        return f"temperature={params.temperature}: vLLM takes at most {MAX_TEMPERATURE}"
    if params.stop_strings and not can_decode:
        return "it has stop strings, but this engine was built without `decode`; pass stop_token_ids"
    return None
