"""Requests, step plans and results as JSON text, for engines whose ranks or workers are other processes.

Reads only what it wrote: an unknown or missing field is a ValueError, never ignored. Nothing here is pickled or evaluated.
Invariant: decode(encode(value)) == value.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TypeVar

from common.serving.engine import DecodeEntry, PrefillChunk, SampledToken, StepPlan, StepResult
from common.types import Completion, FinishReason, Request, SamplingKey, SamplingParams

ValueT = TypeVar("ValueT")


def encode_request(request: Request) -> str:
    return json.dumps(dataclasses.asdict(request))


def decode_request(text: str) -> Request:
    """Raises ValueError when `text` is no encoded request."""

    def build(fields: dict) -> Request:
        sampling, key = fields.pop("sampling"), fields.pop("key")
        for name in ("stop_token_ids", "stop_strings"):
            sampling[name] = tuple(sampling[name])
        prompt_token_ids = tuple(fields.pop("prompt_token_ids"))
        return Request(prompt_token_ids=prompt_token_ids, sampling=SamplingParams(**sampling), key=SamplingKey(**key), **fields)

    return _decode(text, "request", build)


def encode_plan(plan: StepPlan) -> str:
    return json.dumps(dataclasses.asdict(plan))


def decode_plan(text: str) -> StepPlan:
    """Raises ValueError when `text` is no encoded plan."""

    def build(fields: dict) -> StepPlan:
        prefill = tuple(PrefillChunk(**chunk) for chunk in fields.pop("prefill"))
        decode = tuple(DecodeEntry(**entry) for entry in fields.pop("decode"))
        return StepPlan(prefill=prefill, decode=decode, **fields)

    return _decode(text, "step plan", build)


def encode_result(result: StepResult) -> str:
    return json.dumps(dataclasses.asdict(result))


def decode_result(text: str) -> StepResult:
    """Raises ValueError when `text` is no encoded result."""

    def build(fields: dict) -> StepResult:
        tokens = tuple(SampledToken(**token | {"top_logprobs": _top(token["top_logprobs"])}) for token in fields.pop("tokens"))
        completions = tuple(_completion(completion) for completion in fields.pop("completions"))
        return StepResult(tokens=tokens, completions=completions, **fields)

    return _decode(text, "step result", build)


def encode_completion(completion: Completion) -> str:
    return json.dumps(dataclasses.asdict(completion))


def decode_completion(text: str) -> Completion:
    """Raises ValueError when `text` is no encoded completion."""
    return _decode(text, "completion", _completion)


def _completion(fields: dict) -> Completion:
    for name in ("token_ids", "behavior_logprobs", "weight_versions"):
        fields[name] = tuple(fields[name])
    fields["top_logprobs"] = tuple(map(_top, fields["top_logprobs"]))
    return Completion(finish_reason=FinishReason(fields.pop("finish_reason")), **fields)


def _top(pairs: list[list]) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, value) for token_id, value in pairs)


def _decode(text: str, what: str, build: Callable[[dict], ValueT]) -> ValueT:
    try:
        return build(json.loads(text))
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"not an encoded {what}: {error!r} in {text[:200]!r}; both ends must run the same version") from error
