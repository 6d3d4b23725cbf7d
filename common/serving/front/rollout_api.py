"""/rollout/v1: completions by token ids for trainers, and /control/v1: weights, load and draining. Each has its own token.

A rollout call carries a `call_id` of its caller's choice, the same for every attempt at it: an attempt that finds the same call
under way or just answered gets that answer, so that repeating is always safe and samples nothing twice. Everything a trajectory
needs comes back: ids, log-probabilities, and the weight version of every token.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from pydantic import BaseModel, ConfigDict, Field, StrictInt, WithJsonSchema
from starlette.responses import Response

from common.serving.front.access import Client, Interface
from common.serving.front.answer import Answer, Outlet
from common.serving.front.front import Front
from common.serving.front.messages import completion_to_wire, load_to_wire
from common.serving.front.openai_api import ERRORS, identify
from common.serving.front.openai_types import ErrorResponse, Finite
from common.serving.front.repeatable import RepeatableCalls
from common.types import Completion, Request, SamplingKey, SamplingParams

TokenId = Annotated[StrictInt, Field(ge=0, lt=2**31)]
KeyPart = Annotated[StrictInt, Field(ge=0, lt=2**32)]
MAX_TRACE_S = 10.0
"""Some thousand decisions and a megabyte or two of JSON, which hold up everything else on both event loops while they are made."""
Count = Annotated[StrictInt, Field(ge=1, lt=2**31)]


def _numbers(num_values: int) -> WithJsonSchema:
    """How the document shows a tuple of numbers: its `prefixItems` are misread by generators of clients and by checkers."""
    return WithJsonSchema({"type": "array", "items": {"type": "number"}, "minItems": num_values, "maxItems": num_values})


TopLogprob = Annotated[tuple[int, float], _numbers(2)]
"""Token id and log-probability."""
StepTime = Annotated[tuple[float, float, int], _numbers(3)]
"""End on the monotonic clock in seconds, device seconds, tokens."""
TraceSeconds = Annotated[float, Query(gt=0, le=MAX_TRACE_S, allow_inf_nan=False)]

MAX_KEPT_TOKENS = 1 << 20
"""Of answers that can still be asked for again: some 100 MB, and far more than what is answered while a connection is made anew."""
ANSWER_TOKENS = 16
"""What an answer takes besides them."""

CLOSED: dict[int | str, dict[str, Any]] = {403: {"model": ErrorResponse, "description": "This interface is closed"}}
ROLLOUT_ERRORS = {status: ERRORS[status] for status in (400, 401, 408, 413, 429, 503)} | CLOSED
CONTROL_ERRORS = {status: ERRORS[status] for status in (400, 401, 503)} | CLOSED
STAGE_ERRORS = CONTROL_ERRORS | {
    409: {"model": ErrorResponse, "description": "The live weights are not what was staged for; stage again"},
    424: {"model": ErrorResponse, "description": "The weights did not arrive; nothing has changed"},
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Sampling(Strict):
    """common.types.SamplingParams."""

    max_tokens: Count
    temperature: Annotated[Finite, Field(ge=0)] = 1.0
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    top_k: Count | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] = 0.0
    stop_token_ids: list[TokenId] = []
    num_top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] = 0


class Key(Strict):
    """common.types.SamplingKey: where the random numbers come from."""

    run_seed: KeyPart
    trajectory_id: KeyPart
    turn_idx: KeyPart


class GenerateBody(Strict):
    """One turn of a trajectory."""

    call_id: Annotated[str, Field(min_length=8, max_length=64, pattern="^[A-Za-z0-9_-]+$")]
    request_id: Annotated[str, Field(max_length=200)] = ""
    prompt_token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling: Sampling
    key: Key
    cache_namespace: Annotated[str, Field(max_length=200)] = ""


class GenerateResponse(BaseModel):
    """common.types.Completion; lists have one entry for each sampled token."""

    request_id: str
    token_ids: list[int]
    behavior_logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str
    cached_prompt_tokens: int
    top_logprobs: list[list[TopLogprob]]
    error: str | None


class EngineLoadReport(BaseModel):
    running_requests: int
    waiting_requests: int
    used_cache_tokens: int
    capacity_cache_tokens: int
    weight_version: int
    reclaimable_cache_tokens: int


class LoadReport(BaseModel):
    """common.serving.replica.ReplicaLoad."""

    replica_id: str
    weight_version: int | None
    draining: bool
    engine: EngineLoadReport


class CountersReport(BaseModel):
    """Sums since the replica started."""

    num_steps: int
    prefill_tokens: int
    sampled_tokens: int
    device_s: float


class StatusReport(BaseModel):
    """What the replica is, what it holds now, and what it has done."""

    model: str
    engine: str
    vocab_size: int
    max_slots: int
    max_context_tokens: int
    load: LoadReport
    counters: CountersReport


class StageBody(Strict):
    """Which version to make ready (null: the newest), and from which store (null: the one in use)."""

    version: Annotated[StrictInt, Field(ge=0, lt=2**53)] | None = None
    store: Annotated[str, Field(min_length=1, max_length=2000)] | None = None


class StageResponse(BaseModel):
    version: int
    wire_bytes: int
    staged_elements: int
    seconds: dict[str, float]


class VersionResponse(BaseModel):
    version: int


class DigestsResponse(BaseModel):
    """xxh3-128 of the bits of every live tensor in the dtype that is published, by checkpoint name."""

    digests: dict[str, str]


class StepTimesResponse(BaseModel):
    """[end on the monotonic clock in seconds, device seconds, tokens] of the newest steps, oldest first."""

    steps: list[StepTime]


class DecisionsResponse(BaseModel):
    """Names are those of Chrome's trace format."""

    trace_events: list[dict[str, Any]] = Field(alias="traceEvents")
    display_time_unit: str = Field(alias="displayTimeUnit")


class DrainedResponse(BaseModel):
    draining: bool


def router(front: Front) -> APIRouter:
    routes = APIRouter()
    _add_rollouts(routes, front)
    _add_control(routes, front)
    return routes


def _add_rollouts(routes: APIRouter, front: Front) -> None:
    repeatable: RepeatableCalls[Completion] = RepeatableCalls(_kept_tokens, max_kept=MAX_KEPT_TOKENS)

    @routes.post("/rollout/v1/generate", response_model=GenerateResponse, responses=ROLLOUT_ERRORS)
    async def generate(body: GenerateBody, request: HttpRequest) -> Response:
        """Sample one turn to its end."""
        client = identify(front, request, Interface.ROLLOUT)

        async def work(outlet: Outlet) -> None:
            front.check_prompt(body.prompt_token_ids, param="prompt_token_ids")
            with front.concurrency.hold(client, 1):
                turn = _request(client, body)
                completion = await repeatable.run((body.call_id, hash(turn)), lambda: _generate(front, turn))
            await outlet.body(json.dumps(completion_to_wire(dataclasses.replace(completion, request_id=body.request_id))).encode())

        return Answer(front.calls, work)


def _add_control(routes: APIRouter, front: Front) -> None:
    engine = front.rollout_engine

    def answer(request: HttpRequest, call: Callable[[], Awaitable[Any]], to_fields: Callable[[Any], dict[str, Any]]) -> Answer:
        """The fields of what `call` gives, as JSON."""
        identify(front, request, Interface.CONTROL)

        async def work(outlet: Outlet) -> None:
            await outlet.body(json.dumps(to_fields(await call())).encode())

        return Answer(front.calls, work)

    @routes.get("/control/v1/status", response_model=StatusReport, responses=CONTROL_ERRORS)
    async def status(request: HttpRequest) -> dict[str, Any]:
        """Never waits for the engine: as of its newest step."""
        identify(front, request, Interface.CONTROL)
        limits = {name: getattr(engine.info, name) for name in ("vocab_size", "max_slots", "max_context_tokens")}
        names = {"model": front.rollout_model_name, "engine": engine.info.name}
        return {**names, **limits, "load": load_to_wire(engine.load), "counters": vars(engine.counters)}

    @routes.post("/control/v1/stage", response_model=StageResponse, responses=STAGE_ERRORS)
    async def stage(body: StageBody, request: HttpRequest) -> Response:
        """Fetch, decode and verify a version beside the live weights. Repeating it costs nothing; serving goes on."""
        return answer(request, lambda: engine.stage(body.version, body.store), dataclasses.asdict)

    @routes.post("/control/v1/commit", response_model=VersionResponse, responses=STAGE_ERRORS)
    async def commit(request: HttpRequest) -> Response:
        """Serve the staged version from the next step on. Safe to repeat."""
        return answer(request, engine.commit, lambda version: {"version": version})

    @routes.get("/control/v1/digests", response_model=DigestsResponse, responses=CONTROL_ERRORS)
    async def digests(request: HttpRequest) -> Response:
        """What the live weights are, bit by bit. Reads all of them."""
        return answer(request, engine.digests, lambda found: {"digests": found})

    @routes.get("/control/v1/step_times", response_model=StepTimesResponse, responses=CONTROL_ERRORS)
    async def step_times(request: HttpRequest) -> Response:
        """When the newest steps ended, for measurements."""
        return answer(request, engine.step_times, lambda steps: {"steps": steps})

    @routes.get("/control/v1/decisions", response_model=DecisionsResponse, responses=CONTROL_ERRORS)
    async def decisions(request: HttpRequest, seconds: TraceSeconds = 5.0) -> Response:
        """What a co-serving device did in the last seconds and why, in Chrome's trace format: save it, open it in Perfetto."""
        return answer(request, lambda: engine.decisions(seconds), lambda events: {"traceEvents": events, "displayTimeUnit": "ms"})

    @routes.post("/control/v1/drain", response_model=DrainedResponse, responses=CONTROL_ERRORS)
    async def drain(request: HttpRequest) -> Response:
        """Take no new completion and answer when those under way have ended. Safe to repeat."""
        return answer(request, engine.drain, lambda _: {"draining": engine.load.draining})

    @routes.post("/control/v1/resume", response_model=DrainedResponse, responses=CONTROL_ERRORS)
    async def resume(request: HttpRequest) -> Response:
        """Take completions again."""
        return answer(request, engine.resume, lambda _: {"draining": engine.load.draining})


def _kept_tokens(completion: Completion) -> int:
    """What an answer that is kept takes, counted in tokens; a token's alternatives take as much as tokens."""
    return ANSWER_TOKENS + len(completion.token_ids) + 2 * sum(map(len, completion.top_logprobs))


def _request(client: Client, body: GenerateBody) -> Request:
    sampling = body.sampling.model_dump() | {"stop_token_ids": tuple(body.sampling.stop_token_ids)}
    return Request(
        request_id=body.request_id,
        prompt_token_ids=tuple(body.prompt_token_ids),
        sampling=SamplingParams(**sampling),
        key=SamplingKey(**body.key.model_dump()),
        cache_namespace=f"{client.cache_namespace}/{body.cache_namespace}",
    )


async def _generate(front: Front, request: Request) -> Completion:
    metrics = front.metrics.call(Interface.ROLLOUT, num_prompt_tokens=len(request.prompt_token_ids))
    try:
        completion = await front.rollout_engine.generate(request)
    except BaseException as error:
        metrics.finish(error, num_cached_tokens=0)
        raise
    metrics.finish(None, num_cached_tokens=completion.cached_prompt_tokens, num_tokens=len(completion.token_ids))
    return completion
