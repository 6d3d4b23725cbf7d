"""Which requests an engine can never run, in one place, so that every engine refuses the same ones in the same words.

Knows nothing of what is queued or running: an engine adds its own reasons (an id in use, an option it lacks).
"""

from __future__ import annotations

import math

from common.serving.engine import EngineInfo
from common.types import Request


def why_never(request: Request, info: EngineInfo) -> str | None:
    """The reason why `request` can never run on an engine like `info`, naming the value and the fix, or None."""
    return _wrong_prompt(request, info) or _wrong_sampling(request, info)


def _wrong_prompt(request: Request, info: EngineInfo) -> str | None:
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    if not prompt:
        return "the prompt is empty; send at least one token"
    unknown = next((token_id for token_id in prompt if not 0 <= token_id < info.vocab_size), None)
    if unknown is not None:
        return f"token id {unknown} is outside the vocabulary of {info.vocab_size}"
    if max_tokens < 1:
        return f"max_tokens={max_tokens}; ask for at least 1"
    if len(prompt) + max_tokens > info.max_context_tokens:
        return (
            f"{len(prompt)} prompt tokens + max_tokens={max_tokens} exceed the context of {info.max_context_tokens} tokens; "
            "shorten one of them"
        )
    return None


def _wrong_sampling(request: Request, info: EngineInfo) -> str | None:
    params, key = request.sampling, request.key
    if not 0.0 <= params.temperature < math.inf:
        return f"temperature={params.temperature} must be finite and not negative"
    if not 0.0 < params.top_p <= 1.0:
        return f"top_p={params.top_p} must lie in (0, 1]"
    if not 0.0 <= params.min_p <= 1.0:
        return f"min_p={params.min_p} must lie in [0, 1]"
    if params.top_k is not None and params.top_k < 1:
        return f"top_k={params.top_k} must be at least 1, or None"
    if not 0 <= params.num_top_logprobs <= info.vocab_size:
        return f"num_top_logprobs={params.num_top_logprobs} must lie in [0, {info.vocab_size}]"
    if "" in params.stop_strings:
        return "a stop string is empty; leave it out"
    if any(not 0 <= part < 2**32 for part in (key.run_seed, key.trajectory_id, key.turn_idx)):
        return f"{key}: each part must lie in [0, 2**32)"
    return None
