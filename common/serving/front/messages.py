"""What the engine process and the front tell each other, as plain values that msgpack takes.

Compact on purpose: a step's tokens are lists, and a prompt is packed once, so that the engine process spends microseconds on them.
Both ends run the same code; nothing here reads what strangers wrote.
Invariant: from_wire(to_wire(value)) == value for every pair below.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from common.serving.engine import EngineLoad, SampledToken
from common.serving.replica import ReplicaLoad, StageReport
from common.types import Completion, FinishReason, Request, SamplingKey, SamplingParams


def request_to_wire(request: Request) -> dict[str, Any]:
    return vars(request) | {"sampling": vars(request.sampling), "key": vars(request.key)}


def request_from_wire(fields: dict[str, Any]) -> Request:
    sampling = fields["sampling"]
    for name in ("stop_token_ids", "stop_strings"):
        sampling[name] = tuple(sampling[name])
    parts = {
        "prompt_token_ids": tuple(fields["prompt_token_ids"]),
        "sampling": SamplingParams(**sampling),
        "key": SamplingKey(**fields["key"]),
    }
    return Request(**fields | parts)


def completion_to_wire(completion: Completion) -> dict[str, Any]:
    return vars(completion) | {"finish_reason": completion.finish_reason.value}


def completion_from_wire(fields: dict[str, Any]) -> Completion:
    parts: dict[str, Any] = {name: tuple(fields[name]) for name in ("token_ids", "behavior_logprobs", "weight_versions")}
    parts["top_logprobs"] = tuple(map(_top, fields["top_logprobs"]))
    parts["finish_reason"] = FinishReason(fields["finish_reason"])
    return Completion(**fields | parts)


def token_to_wire(token: SampledToken) -> list[Any]:
    return [token.request_id, token.token_id, token.behavior_logprob, token.weight_version, token.top_logprobs]


def token_from_wire(fields: list[Any]) -> SampledToken:
    request_id, token_id, logprob, version, top = fields
    return SampledToken(
        request_id=request_id, token_id=token_id, behavior_logprob=logprob, weight_version=version, top_logprobs=_top(top)
    )


def load_to_wire(load: ReplicaLoad) -> dict[str, Any]:
    return vars(load) | {"engine": vars(load.engine)}


def load_from_wire(fields: dict[str, Any]) -> ReplicaLoad:
    return ReplicaLoad(**fields | {"engine": EngineLoad(**fields["engine"])})


def report_to_wire(report: StageReport) -> dict[str, Any]:
    return dataclasses.asdict(report)


def report_from_wire(fields: dict[str, Any]) -> StageReport:
    return StageReport(**fields)


def _top(pairs: list[list[Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((token_id, value) for token_id, value in pairs)
