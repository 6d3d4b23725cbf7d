"""The server's OpenAPI document beside the types of the pinned openai package, both as JSON schemas.

Answers: whatever our document allows, the package's type allows, down to the last field. Requests: every parameter of the package
is known here or refused by name, and takes every kind of JSON value that the package sends in it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import types as completion_types
from openai.types import chat as chat_types
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter, ValidationError

from common.serving.front.openai_types import EXTENSIONS, IGNORED, NEUTRAL
from tests.common.serving.front.running import MODEL, RunningFront

Schema = dict[str, Any]

REQUESTS = {
    "CompletionRequest": (completion_params.CompletionCreateParamsNonStreaming, completion_params.CompletionCreateParamsStreaming),
    "ChatCompletionRequest": (chat_params.CompletionCreateParamsNonStreaming, chat_params.CompletionCreateParamsStreaming),
}
ANSWERS: dict[str, type[BaseModel]] = {
    "CompletionResponse": completion_types.Completion,
    "CompletionEvent": completion_types.Completion,
    "ChatCompletionResponse": chat_types.ChatCompletion,
    "ChatCompletionChunk": chat_types.ChatCompletionChunk,
    "Model": completion_types.Model,
    "ErrorDetail": ErrorObject,
}
ALLOWED = {"CompletionEvent.choices[].finish_reason: null"}
"""As OpenAI's own events in mid-stream: the package has one type for events and whole completions, and does not check it."""
SCALARS = {"string", "integer", "number", "boolean", "null"}
INCLUDED_IN = {"integer": {"number"}}
PARTS = [{"type": "text", "text": "go"}]


@pytest.fixture(scope="module")
def document(server: RunningFront) -> Schema:
    return server.ask("/openapi.json")[1]


def variants(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The schemas without references that a schema is the union of."""
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        yield from variants(target, root)
    elif "anyOf" in schema or "oneOf" in schema:
        for part in schema.get("anyOf") or schema["oneOf"]:
            yield from variants(part, root)
    else:
        yield schema


def values(schema: Schema) -> set[Any] | None:
    """The values that a schema is limited to, if it is."""
    if "const" in schema:
        return {schema["const"]}
    return set(schema["enum"]) if "enum" in schema else None


def kind(schema: Schema) -> str:
    limited = values(schema)
    return str(schema.get("type") or ("any" if limited is None else {str: "string", bool: "boolean"}[type(min(limited))]))


def beyond(ours: Schema, our_root: Schema, theirs: Schema, their_root: Schema, where: str) -> set[str]:
    """What our schema allows and theirs does not, as paths."""
    found: set[str] = set()
    allowed = list(variants(theirs, their_root))
    for schema in variants(ours, our_root):
        alike = [
            each for each in allowed if kind(each) in {"any", kind(schema)} or (kind(schema), kind(each)) == ("integer", "number")
        ]
        if not alike:
            found.add(f"{where}: {kind(schema)}")
        elif kind(schema) in SCALARS:
            limits = [values(each) for each in alike]
            if None not in limits:
                known = set().union(*(limit or () for limit in limits))
                possible = values(schema) or ({True, False} if kind(schema) == "boolean" else {"any value"})
                found |= {f"{where}: {value}" for value in possible - known}
        else:
            found |= min((beyond_container(schema, our_root, each, their_root, where) for each in alike), key=len)
    return found


def beyond_container(ours: Schema, our_root: Schema, theirs: Schema, their_root: Schema, where: str) -> set[str]:
    """The same of two arrays or two objects."""
    if kind(theirs) == "any":
        return set()
    if kind(ours) == "array":
        return beyond(ours["items"], our_root, theirs["items"], their_root, f"{where}[]")
    found = {f"{where}.{name} may be missing" for name in set(theirs.get("required", ())) - set(ours.get("required", ()))}
    known = theirs.get("properties", {})
    for name, schema in ours.get("properties", {}).items():
        if name in known:
            found |= beyond(schema, our_root, known[name], their_root, f"{where}.{name}")
        else:
            found.add(f"{where}.{name} is unknown")
    for each in (ours, theirs):
        assert isinstance(each.get("additionalProperties", True), bool | dict)
    if isinstance(ours.get("additionalProperties"), dict):
        found |= beyond(ours["additionalProperties"], our_root, theirs["additionalProperties"], their_root, f"{where}.*")
    return found


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_what_the_packages_types_allow(document: Schema, name: str) -> None:
    theirs = ANSWERS[name].model_json_schema()
    found = beyond(document["components"]["schemas"][name], document, theirs, theirs, name)
    assert found == {path for path in ALLOWED if path.startswith(f"{name}.")}


def test_a_difference_between_two_schemas_is_found_wherever_it_is() -> None:
    theirs = chat_types.ChatCompletion.model_json_schema()
    text = json.dumps(theirs)
    for before, after, where in (
        ('"logprob": {"title": "Logprob", "type": "number"}', '"logprob": {"type": "string"}', "logprob: string"),
        ('"enum": ["stop", "length"', '"enum": ["halt", "length"', "choices[].finish_reason: halt"),
        ('"required": ["completion_tokens", ', '"required": [', "usage.completion_tokens may be missing"),
        ('"cached_tokens": {', '"cached": {', "usage.prompt_tokens_details.cached is unknown"),
    ):
        assert before in text
        ours = json.loads(text.replace(before, after))
        assert any(path.endswith(where) for path in beyond(ours, ours, theirs, theirs, "x")), where
    assert beyond(theirs, theirs, theirs, theirs, "x") == set()


def test_every_answer_in_the_document_is_compared(document: Schema) -> None:
    for path, name, event in (
        ("/v1/completions", "CompletionResponse", "CompletionEvent"),
        ("/v1/chat/completions", "ChatCompletionResponse", "ChatCompletionChunk"),
    ):
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert content["text/event-stream"]["x-event-schema"] == {"$ref": f"#/components/schemas/{event}"}
    schemas = document["components"]["schemas"]
    assert schemas["ModelList"]["properties"]["data"]["items"] == {"$ref": "#/components/schemas/Model"}
    assert schemas["ErrorResponse"]["properties"]["error"] == {"$ref": "#/components/schemas/ErrorDetail"}


def parameters(name: str) -> dict[str, tuple[Schema, Schema]]:
    """The package's schema of every parameter, streaming or not, and the document that it belongs to."""
    found: dict[str, tuple[Schema, Schema]] = {}
    for kind_of_request in REQUESTS[name]:
        root = TypeAdapter(kind_of_request).json_schema()
        for field, schema in root["properties"].items():
            before = [found[field][0]] if field in found else []
            found[field] = ({"anyOf": [*before, schema]}, root)
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_every_parameter_of_the_package_is_known_and_every_other_is_a_named_extension(document: Schema, name: str) -> None:
    schema = document["components"]["schemas"][name]
    ours, theirs = set(schema["properties"]), set(parameters(name))
    assert theirs <= ours | set(NEUTRAL) | IGNORED, "parameters that would be called unknown"
    assert ours - theirs <= EXTENSIONS
    assert set(schema["required"]) == {field for field in theirs if field in {"model", "prompt", "messages"}}


@pytest.mark.parametrize("name", REQUESTS)
def test_fields_take_every_kind_of_value_that_the_package_sends_and_no_other(document: Schema, name: str) -> None:
    theirs = parameters(name)
    for field, schema in document["components"]["schemas"][name]["properties"].items():
        if field not in EXTENSIONS:
            kinds = [{kind(each) for each in variants(one, root)} for one, root in ((schema, document), theirs[field])]
            assert kinds[0] | {"null"} == kinds[1] | {"null"}, field
            if field != "messages":
                found = beyond(schema, document, *theirs[field], field)
                assert all(path.endswith(": null") for path in found), "null is what leaving a field out is; nothing else is new"


def test_messages_take_every_role_with_text_as_the_package_types_it(document: Schema, server: RunningFront) -> None:
    roles = document["components"]["schemas"]["ChatMessage"]["properties"]["role"]["enum"]
    message_type = TypeAdapter(chat_types.ChatCompletionMessageParam)
    for role, content in itertools.product(roles, ("go", PARTS)):
        message_type.validate_python({"role": role, "content": content})
        body = {"model": MODEL, "messages": [{"role": role, "content": content}], "max_tokens": 1}
        assert server.ask("/v1/chat/completions", body)[0] == 200, (role, content)
    for role in ("tool", "function", "nobody"):
        status, answer = server.ask("/v1/chat/completions", {"model": MODEL, "messages": [{"role": role, "content": "go"}]})
        assert (status, answer["error"]["param"]) == (400, "messages")
    with pytest.raises(ValidationError):
        message_type.validate_python({"role": "nobody", "content": "go"})


def test_answers_of_the_server_are_the_packages_own_types(server: RunningFront) -> None:
    """Strictly: no field is missing, and none has a type that the package would have to guess."""
    _, answer = server.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 3, "logprobs": 2, "n": 2})
    completion_types.Completion.model_validate(answer, strict=True)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "go"}], "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    chat_types.ChatCompletion.model_validate(server.ask("/v1/chat/completions", body)[1], strict=True)
    _, _, content = server.ask_raw("/v1/chat/completions", json.dumps(body | {"stream": True}).encode())
    events = [line.removeprefix("data: ") for line in content.decode().splitlines() if line.startswith("data: {")]
    for event in events:
        chat_types.ChatCompletionChunk.model_validate_json(event, strict=True)
    assert len(events) > 2
