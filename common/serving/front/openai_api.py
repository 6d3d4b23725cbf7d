"""/v1/completions, /v1/chat/completions and /v1/models: OpenAI's API over an engine in another process.

Log-probabilities are those of the distribution the token was drawn from (at the request's temperature, at 1 for greedy decoding),
before top-p cut it: what a policy gradient needs. The weight version stands in `system_fingerprint`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from pydantic import BaseModel
from starlette.responses import Response

from common.serving.front.access import Client, Interface
from common.serving.front.answer import Answer, Outlet
from common.serving.front.errors import ApiError, unknown_model
from common.serving.front.forms import ChatForm, CompletionForm
from common.serving.front.front import Front
from common.serving.front.generation import Generation, Piece
from common.serving.front.openai_types import (
    DEFAULT_COMPLETION_TOKENS,
    SCHEMA_REFERENCE,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionEvent,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
    Model,
    ModelList,
    SamplingFields,
)
from common.types import SamplingParams

LONG_TEXT_CHARACTERS = 2000
"""Longer texts are tokenized in a thread of their own, so that other clients' tokens pass meanwhile."""

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request asks for something that cannot be done",
        401: "Missing or wrong API key",
        404: "Unknown model",
        408: "The body did not arrive in time",
        413: "The body is too large",
        429: "This client has too many completions under way",
        503: "No new request is taken now",
    }.items()
}

EVENTS: Mapping[str, type[BaseModel]] = {"/v1/completions": CompletionEvent, "/v1/chat/completions": ChatCompletionChunk}
"""What the JSON of a streamed answer's events is; the last event is [DONE]."""


def _streams(path: str) -> dict[int | str, dict[str, Any]]:
    """How the document shows that an endpoint also streams: OpenAPI 3.1 has no word for the schema of an event."""
    event = {"$ref": SCHEMA_REFERENCE.format(model=EVENTS[path].__name__)}
    content = {"text/event-stream": {"schema": {"type": "string"}, "x-event-schema": event}}
    return {200: {"description": "The whole answer; with `stream`, events", "content": content}}


class Form(Protocol):
    """How pieces become the answers of one endpoint."""

    def first_events(self, choice_idx: int) -> list[dict[str, Any]]: ...

    def event(self, piece: Piece) -> dict[str, Any]: ...

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]: ...

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call, checked: its prompts in token ids and how each is to be continued."""

    fields: SamplingFields
    prompts: list[list[int]]
    sampling: list[SamplingParams]
    form: Form

    @property
    def n(self) -> int:
        return self.fields.n or 1


def router(front: Front) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=ERRORS | _streams("/v1/completions"))
    async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
        """Continue prompts."""
        client = identify(front, request, Interface.ONLINE)

        async def work(outlet: Outlet) -> None:
            check(front, body)
            prompts, texts = await _completion_prompts(front, body)
            num_top = body.logprobs
            sampling = [_sampling(front, body, prompt, body.max_tokens or DEFAULT_COMPLETION_TOKENS, num_top) for prompt in prompts]
            form = CompletionForm(
                header=_header(front, "cmpl"),
                tokenizer=front.tokenizer,
                num_top=num_top,
                prefixes=[text for text in texts for _ in range(body.n or 1)],
            )
            await _generate(front, client, Call(fields=body, prompts=prompts, sampling=sampling, form=form), outlet)

        return Answer(front.calls, work)

    @routes.post("/v1/chat/completions", response_model=ChatCompletionResponse, responses=ERRORS | _streams("/v1/chat/completions"))
    async def chat_completions(body: ChatCompletionRequest, request: HttpRequest) -> Response:
        """Write the next message of a chat."""
        client = identify(front, request, Interface.ONLINE)

        async def work(outlet: Outlet) -> None:
            check(front, body)
            prompt = await _chat_prompt(front, body)
            front.check_prompt(prompt, param="messages")
            longest = front.max_completion_tokens(len(prompt), param="messages")
            num_top = (body.top_logprobs or 0) if body.logprobs else None
            max_tokens = body.max_completion_tokens or body.max_tokens or longest
            sampling = [_sampling(front, body, prompt, max_tokens, num_top)]
            form = ChatForm(header=_header(front, "chatcmpl"), tokenizer=front.tokenizer, num_top=num_top)
            await _generate(front, client, Call(fields=body, prompts=[prompt], sampling=sampling, form=form), outlet)

        return Answer(front.calls, work)

    def served_model() -> Model:
        return Model(id=front.model_name, object="model", created=front.started_s, owned_by="rose")

    @routes.get("/v1/models", response_model=ModelList, responses={401: ERRORS[401]})
    async def models(request: HttpRequest) -> ModelList:
        """The one model that is served."""
        identify(front, request, Interface.ONLINE)
        return ModelList(object="list", data=[served_model()])

    @routes.get("/v1/models/{model:path}", response_model=Model, responses={401: ERRORS[401], 404: ERRORS[404]})
    async def model(model: str, request: HttpRequest) -> Model:
        """What is known of a model."""
        identify(front, request, Interface.ONLINE)
        if model != front.model_name:
            raise unknown_model(model, front.model_name)
        return served_model()

    return routes


def identify(front: Front, request: HttpRequest, interface: Interface) -> Client:
    """Raises ApiError if the caller may not use the interface."""
    peer = request.client.host if request.client else "local"
    return front.tokens.identify(interface, request.headers.get("authorization"), peer)


def check(front: Front, body: SamplingFields) -> None:
    """Raises ApiError for what the types of the body cannot say."""
    if body.model != front.model_name:
        raise unknown_model(body.model, front.model_name)
    body.check_others()


def _header(front: Front, prefix: str) -> Callable[[], dict[str, Any]]:
    call_id, created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
    return lambda: {
        "id": call_id,
        "created": created,
        "model": front.model_name,
        "system_fingerprint": front.fingerprint,
    }


def _sampling(front: Front, body: SamplingFields, prompt: Sequence[int], max_tokens: int, num_top: int | None) -> SamplingParams:
    stop_token_ids = () if body.ignore_eos else front.tokenizer.stop_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=None if body.top_k in (None, 0, -1) else body.top_k,
        min_p=body.min_p or 0.0,
        stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *(body.stop_token_ids or ())))),
        num_top_logprobs=min(num_top or 0, front.engine.info.vocab_size),
    )


async def _completion_prompts(front: Front, body: CompletionRequest) -> tuple[list[list[int]], list[str]]:
    """Token ids of every prompt, and the text that `echo` puts before its completions."""
    prompt = body.prompt
    parts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    prompts = [await _encode(front, part) if isinstance(part, str) else list(part) for part in parts]
    for token_ids in prompts:
        front.check_prompt(token_ids, param="prompt")
        if not all(0 <= token_id < front.engine.info.vocab_size for token_id in token_ids):
            message = f"'prompt' holds token ids outside the vocabulary of {front.engine.info.vocab_size}."
            raise ApiError(400, message, param="prompt")
    if not body.echo:
        return prompts, [""] * len(prompts)
    if body.logprobs is not None:
        raise ApiError(400, "'echo' with 'logprobs' is not supported here.", param="echo", code="unsupported_parameter")
    texts = [part if isinstance(part, str) else front.tokenizer.decode(part) for part in parts]
    return prompts, texts


async def _encode(front: Front, text: str) -> list[int]:
    if len(text) < LONG_TEXT_CHARACTERS:
        return front.tokenizer.encode_text(text)
    return await asyncio.to_thread(front.tokenizer.encode_text, text)


async def _chat_prompt(front: Front, body: ChatCompletionRequest) -> list[int]:
    """Raises ApiError if the model's template refuses the chat."""
    messages = []
    for message in body.messages:
        role = "system" if message.role == "developer" else message.role  # OpenAI's newer name, which templates do not know
        name = {} if message.name is None else {"name": message.name}
        messages.append({"role": role, "content": message.text} | name)
    try:
        if sum(len(message["content"]) for message in messages) < LONG_TEXT_CHARACTERS:
            return front.tokenizer.encode_chat(messages)
        return await asyncio.to_thread(front.tokenizer.encode_chat, messages)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


async def _generate(front: Front, client: Client, call: Call, outlet: Outlet) -> None:
    """Run a call and send its answer."""
    requests = front.online_requests(client, call.prompts, call.n, call.sampling, call.fields.seed)
    num_prompt_tokens = sum(map(len, call.prompts))
    metrics = front.metrics.call(Interface.ONLINE, num_prompt_tokens=num_prompt_tokens, num_choices=len(requests))
    generation = Generation(front.engine, front.tokenizer, requests, stops=call.fields.stops, metrics=metrics)
    with front.concurrency.hold(client, len(requests)), generation:
        if call.fields.stream:
            await _stream(call, generation, num_prompt_tokens, outlet)
            return
        pieces: list[list[Piece]] = [[] for _ in requests]
        async for piece in generation.pieces():
            pieces[piece.choice_idx].append(piece)
    await outlet.body(_json(call.form.whole(pieces, _usage(generation, num_prompt_tokens))))


async def _stream(call: Call, generation: Generation, num_prompt_tokens: int, outlet: Outlet) -> None:
    begun: set[int] = set()
    no_usage: dict[str, Any] = {"usage": None} if call.fields.include_usage else {}
    async for piece in generation.pieces():
        events = [] if piece.choice_idx in begun else call.form.first_events(piece.choice_idx)
        begun.add(piece.choice_idx)
        for event in [*events, call.form.event(piece)]:
            await outlet.event(_json(event | no_usage).decode())
    if call.fields.include_usage:
        await outlet.event(_json(call.form.usage_event(_usage(generation, num_prompt_tokens))).decode())
    await outlet.end_events()


def _usage(generation: Generation, num_prompt_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": generation.num_completion_tokens,
        "total_tokens": num_prompt_tokens + generation.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


def _json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "backslashreplace")
