"""The messages of JetStream's gRPC service, built from their field numbers.

What travels is the same as with google-jetstream 0.2.2 (a test compares the two), which therefore need not be installed, and
TensorFlow, which it depends on, stays out of the front. The descriptors live in a pool of their own, so that both can be imported
into one process.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "jetstream_proto"
SERVICE = f"{PACKAGE}.Orchestrator"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {"string": _Field.TYPE_STRING, "int32": _Field.TYPE_INT32, "bool": _Field.TYPE_BOOL}

FIELDS: dict[str, list[tuple[int, str, str, str]]] = {
    "DecodeRequest": [
        (1, "session_cache", "string", "single"),
        (3, "priority", "int32", "single"),
        (4, "max_tokens", "int32", "single"),
        (5, "text_content", "DecodeRequest.TextContent", "content"),
        (6, "token_content", "DecodeRequest.TokenContent", "content"),
    ],
    "DecodeRequest.TextContent": [(1, "text", "string", "single")],
    "DecodeRequest.TokenContent": [(1, "token_ids", "int32", "repeated")],
    "DecodeResponse": [
        (2, "initial_content", "DecodeResponse.InitialContent", "content"),
        (3, "stream_content", "DecodeResponse.StreamContent", "content"),
    ],
    "DecodeResponse.InitialContent": [],
    "DecodeResponse.StreamContent": [(1, "samples", "DecodeResponse.StreamContent.Sample", "repeated")],
    "DecodeResponse.StreamContent.Sample": [(1, "text", "string", "single"), (2, "token_ids", "int32", "repeated")],
    "HealthCheckRequest": [],
    "HealthCheckResponse": [(1, "is_live", "bool", "single")],
}
"""(number, name, type, and how often: single, repeated, or the name of the oneof it belongs to) of every field."""


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="rose/jetstream.proto", package=PACKAGE, syntax="proto3")
    messages: dict[str, descriptor_pb2.DescriptorProto] = {}
    for path, fields in FIELDS.items():
        outer, _, name = path.rpartition(".")
        message = (messages[outer].nested_type if outer else file.message_type).add(name=name)
        messages[path] = message
        for number, field_name, type_name, how in fields:
            field = message.field.add(name=field_name, number=number)
            field.label = _Field.LABEL_REPEATED if how == "repeated" else _Field.LABEL_OPTIONAL
            if type_name in _SCALARS:
                field.type = _SCALARS[type_name]
            else:
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}.{type_name}"
            if how not in ("single", "repeated"):
                if not message.oneof_decl:
                    message.oneof_decl.add(name=how)
                field.oneof_index = 0
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(_file())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))


DecodeRequest: Any = _message("DecodeRequest")
DecodeResponse: Any = _message("DecodeResponse")
HealthCheckRequest: Any = _message("HealthCheckRequest")
HealthCheckResponse: Any = _message("HealthCheckResponse")
