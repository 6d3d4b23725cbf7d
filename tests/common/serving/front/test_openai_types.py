"""The server's OpenAPI document beside the types of the pinned openai package: the same fields, each known or refused by name."""

from __future__ import annotations

import types
import typing
from typing import Any

import pytest
import typing_extensions
from openai import types as completion_types
from openai.types import chat as chat_types
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel, TypeAdapter

from common.serving.front.openai_types import EXTENSIONS, IGNORED, NEUTRAL
from tests.common.serving.front.running import MODEL, RunningFront

REQUESTS = {
    "CompletionRequest": (completion_params.CompletionCreateParamsNonStreaming, completion_params.CompletionCreateParamsStreaming),
    "ChatCompletionRequest": (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
}
RESPONSES: dict[str, type[BaseModel]] = {
    "CompletionResponse": completion_types.Completion,
    "CompletionChoice": completion_types.CompletionChoice,
    "CompletionLogprobs": completion_types.completion_choice.Logprobs,
    "Usage": completion_types.CompletionUsage,
    "ChatCompletionResponse": chat_types.ChatCompletion,
    "ChatChoice": chat_types.chat_completion.Choice,
    "AssistantMessage": chat_types.ChatCompletionMessage,
    "ChatLogprobs": chat_types.chat_completion.ChoiceLogprobs,
    "TokenLogprob": chat_types.ChatCompletionTokenLogprob,
    "TopLogprob": chat_types.chat_completion_token_logprob.TopLogprob,
    "Model": completion_types.Model,
}


@pytest.fixture(scope="module")
def schemas(server: RunningFront) -> dict[str, Any]:
    return server.ask("/openapi.json")[1]["components"]["schemas"]


def parameters(types: tuple[type, ...]) -> dict[str, Any]:
    """Annotation of every parameter, those of the streaming form included."""
    return {name: hint for each in types for name, hint in typing.get_type_hints(each, include_extras=True).items()}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_parameter_of_the_package_is_known_and_every_other_is_a_named_extension(schemas: dict[str, Any], name: str) -> None:
    ours = set(schemas[name]["properties"])
    theirs = set(parameters(REQUESTS[name]))
    assert theirs <= ours | set(NEUTRAL) | IGNORED, "parameters that would be called unknown"
    assert ours - theirs <= EXTENSIONS
    assert set(schemas[name]["required"]) == {key for key in theirs if key in {"model", "prompt", "messages"}}


@pytest.mark.parametrize("name", REQUESTS)
def test_fields_take_every_json_type_that_the_package_sends(schemas: dict[str, Any], name: str) -> None:
    theirs = parameters(REQUESTS[name])
    for field, schema in schemas[name]["properties"].items():
        if field not in EXTENSIONS:
            assert kinds_of_hint(theirs[field]) <= kinds(schema), field


def kinds_of_hint(hint: Any) -> set[str]:
    """JSON types of the values that a Python annotation allows, null left out."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds_of_hint, arguments))
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return kinds_of_hint(arguments[0])
    if origin is typing.Literal:
        return set().union(*(kinds_of_hint(type(value)) for value in arguments))
    scalars = {str: "string", bool: "boolean", int: "integer", float: "number"}
    if hint in scalars:
        return {scalars[hint]}
    if hint is type(None):
        return set()
    return {"object"} if typing_extensions.is_typeddict(hint) or origin is dict else {"array"}


@pytest.mark.parametrize("name", RESPONSES)
def test_answers_have_the_packages_fields_under_its_types(schemas: dict[str, Any], name: str) -> None:
    theirs = RESPONSES[name].model_json_schema()
    ours = schemas[name]
    assert set(ours["properties"]) <= set(theirs["properties"])
    nullable = {"finish_reason", "logprobs"}  # an event in mid-stream has none yet
    assert set(theirs.get("required", ())) - nullable <= set(ours.get("required", ())) | {"object", "role"}
    for field, schema in ours["properties"].items():
        if field not in nullable:
            assert kinds(schema) <= kinds(theirs["properties"][field]) | {"null"}, field


def kinds(schema: dict[str, Any]) -> set[str]:
    """JSON types that a schema allows, one level deep."""
    if "anyOf" in schema:
        return set().union(*(kinds(part) for part in schema["anyOf"]))
    if "$ref" in schema:
        return {"object"}
    if "const" in schema or "enum" in schema:
        return {"string"}
    return {str(schema.get("type", "any"))}


def test_answers_of_the_server_are_the_packages_own_types(server: RunningFront) -> None:
    """Strictly: no field is missing, and none has a type that the package would have to guess."""
    _, answer = server.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 3, "logprobs": 2, "n": 2})
    completion_types.Completion.model_validate(answer, strict=True)
    messages = [{"role": "user", "content": "go"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    chat_types.ChatCompletion.model_validate(server.ask("/v1/chat/completions", body)[1], strict=True)
    _, _, content = server.ask_raw("/v1/chat/completions", TypeAdapter(dict).dump_json(body | {"stream": True}))
    events = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: {")]
    for event in events:
        chat_types.ChatCompletionChunk.model_validate_json(event, strict=True)
    assert len(events) > 2
