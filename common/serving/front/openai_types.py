"""Requests and responses of /v1/completions and /v1/chat/completions: field names, types and defaults of OpenAI's API.

A parameter that OpenAI has and this server has not is refused by name, unless its value asks for nothing (NEUTRAL); one that
nobody has is refused as OpenAI refuses it. Nothing is silently ignored but what cannot change an answer (IGNORED). EXTENSIONS are
the ones that vLLM's clients send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, WithJsonSchema

from common.serving.front.errors import ApiError

SCHEMA_REFERENCE = "#/components/schemas/{model}"
"""Where the OpenAPI document keeps the schema of a type."""

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 1024
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of /v1/completions; a chat may go on to the end of the context."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "audio": (),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that are not supported, and the values (besides null) that ask for nothing."""
IGNORED = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"}
)
EXTENSIONS = frozenset({"top_k", "min_p", "ignore_eos", "stop_token_ids", "repetition_penalty", "request_id"})


def _check_prompt(prompt: Any) -> Any:
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(parts, list) and parts:
        if all(isinstance(part, str) for part in parts):
            "".join(parts).encode()  # a ValueError for half a surrogate pair, which JSON lets through
            return prompt
        if all(type(part) is int for part in parts):
            return prompt
        if all(isinstance(part, list) and part and all(type(token_id) is int for token_id in part) for part in parts):
            return prompt
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids, not empty")


_TOKEN_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
Prompt = Annotated[
    Any,
    AfterValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Seed = Annotated[StrictInt, Field(ge=-(2**63), lt=2**63)]
Positive = Annotated[StrictInt, Field(ge=1, lt=2**31)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class SamplingFields(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[Annotated[StrictInt, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def check_others(self) -> None:
        """Raises ApiError for a parameter that this server does not have, and for options that contradict each other."""
        for name, value in (self.model_extra or {}).items():
            if name in IGNORED or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
                continue
            if name in NEUTRAL:
                raise ApiError(
                    400, f"Unsupported parameter: '{name}' is not supported here.", param=name, code="unsupported_parameter"
                )
            raise ApiError(400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' is only allowed when 'stream' is true.", param="stream_options")


class CompletionRequest(SamplingFields):
    """Body of /v1/completions."""

    prompt: Prompt
    max_tokens: Positive | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None
    echo: StrictBool | None = None


class ContentPart(BaseModel):
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a chat. Content may come in parts, as long as all are text."""

    model_config = ConfigDict(extra="allow")

    role: Literal["developer", "system", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(SamplingFields):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=20)] | None = None

    def check_others(self) -> None:
        super().check_others()
        for idx, message in enumerate(self.messages):
            for name, value in (message.model_extra or {}).items():
                if value not in (None, []):  # what a client got in an answer and sends back
                    param = f"messages[{idx}].{name}"
                    raise ApiError(400, f"'{param}' is not supported here.", param=param, code="unsupported_parameter")
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs")


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionEventChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionChoice(CompletionEventChoice):
    finish_reason: Literal["stop", "length"]


class CompletionEvent(BaseModel):
    """An event of a streamed completion; `usage` is there if it was asked for, and null in all events but the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionEventChoice]
    usage: Usage | None = None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(BaseModel):
    """An event of a streamed chat completion; `usage` as in CompletionEvent."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: Literal["list"]
    data: Sequence[Model]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorDetail
