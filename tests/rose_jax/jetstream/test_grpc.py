"""JetStream's gRPC service over a fake engine, and its messages beside google-jetstream's own where that is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from common.serving.front.access import Tokens
from common.serving.front.front import ONLINE_PRIORITY
from common.transfer.secrets import Secret
from common.types import Request, SamplingKey, SamplingParams
from rose_jax.jetstream import grpc_proto
from rose_jax.jetstream.grpc_proto import SERVICE, DecodeRequest, DecodeResponse, HealthCheckRequest, HealthCheckResponse
from rose_jax.jetstream.grpc_service import GrpcServer
from tests.common.serving.front.running import RunningFront, alone, chatml, running_front

KEY = "a-key-of-these-tests"


class Stub:
    """A plain client of the service."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.decode = channel.unary_stream(f"/{SERVICE}/Decode", DecodeRequest.SerializeToString, DecodeResponse.FromString)
        self.health = channel.unary_unary(
            f"/{SERVICE}/HealthCheck",
            HealthCheckRequest.SerializeToString,
            HealthCheckResponse.FromString,
            _registered_method=False,
        )


@contextlib.contextmanager
def grpc_server(front: RunningFront) -> Iterator[int]:
    async def start() -> GrpcServer:
        server = GrpcServer(front.front, host="127.0.0.1", port=0)
        await server.start()
        return server

    server = front.call(start())
    try:
        yield server.port
    finally:
        front.call(server.stop())


@contextlib.contextmanager
def client(**options: Any) -> Iterator[tuple[Stub, RunningFront]]:
    with running_front(**options) as front, grpc_server(front) as port, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Stub(channel), front


def text_request(text: str, **fields: Any) -> Any:
    return DecodeRequest(text_content=DecodeRequest.TextContent(text=text), **fields)


def test_text_comes_back_for_text_and_ids_for_ids_and_both_are_the_engines() -> None:
    prompt = chatml().encode_text("go upper")
    expected = alone(
        Request(
            request_id="alone",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=20, temperature=0.0, stop_token_ids=chatml().stop_token_ids),
            key=SamplingKey(run_seed=0, trajectory_id=0, turn_idx=0),
            priority=ONLINE_PRIORITY,
        )
    )
    with client() as (stub, _):
        assert stub.health(HealthCheckRequest(), timeout=60).is_live
        samples = [r.stream_content.samples[0] for r in stub.decode(text_request("go upper", max_tokens=20), timeout=60)]
        assert "".join(sample.text for sample in samples) == chatml().decode([*prompt, *expected.token_ids])[len("go upper") :]
        token_content = DecodeRequest.TokenContent(token_ids=prompt)
        by_ids = stub.decode(DecodeRequest(token_content=token_content, max_tokens=20), timeout=60)
        samples = [response.stream_content.samples[0] for response in by_ids]
        assert [token_id for sample in samples for token_id in sample.token_ids] == list(expected.token_ids)
        assert not any(sample.text for sample in samples)


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (DecodeRequest(max_tokens=3), grpc.StatusCode.INVALID_ARGUMENT, "no content"),
        (text_request("go", session_cache="x"), grpc.StatusCode.INVALID_ARGUMENT, "session_cache"),
        (text_request("go", max_tokens=-1), grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=-1"),
        (text_request("go", max_tokens=10_000), grpc.StatusCode.INVALID_ARGUMENT, "exceed the context"),
        (text_request(""), grpc.StatusCode.INVALID_ARGUMENT, "empty"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(request_: Any, code: grpc.StatusCode, text: str) -> None:
    with client() as (stub, _), pytest.raises(grpc.RpcError, match=text) as refused:
        list(stub.decode(request_, timeout=60))
    assert refused.value.code() is code


def test_a_client_that_cancels_gives_its_slot_back() -> None:
    with client(step_s=0.01) as (stub, front):
        call = stub.decode(text_request("go"), timeout=60)
        next(call)
        assert front.engine.load().running_requests == 1
        call.cancel()
        front.wait_until(front.is_idle)


def test_draining_finishes_calls_refuses_others_and_says_not_live() -> None:
    with client(step_s=0.01) as (stub, front):
        call = stub.decode(text_request("go", max_tokens=50), timeout=60)
        next(call)
        front._loop.call_soon_threadsafe(setattr, front.front.calls, "draining", True)
        front.wait_until(lambda: front.front.calls.draining)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.decode(text_request("go", max_tokens=5), timeout=60))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not stub.health(HealthCheckRequest(), timeout=60).is_live
        assert len(list(call)) > 0
        front._loop.call_soon_threadsafe(front.front.calls.stop_now.set)


def test_a_second_stop_ends_a_call_with_an_answer() -> None:
    with client(step_s=0.05) as (stub, front):
        call = stub.decode(text_request("go"), timeout=60)
        next(call)
        front._loop.call_soon_threadsafe(front.front.calls.stop_now.set)
        with pytest.raises(grpc.RpcError, match="told to stop at once") as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        front.wait_until(front.is_idle)


def test_a_port_that_another_server_has_is_refused_instead_of_shared() -> None:
    with running_front() as front, grpc_server(front) as port:

        async def start_another() -> None:
            GrpcServer(front.front, host="127.0.0.1", port=port)

        with pytest.raises(ValueError, match=f"--grpc_port={port} cannot be listened on at 127.0.0.1: .*; name another"):
            front.call(start_another())


def test_the_api_key_is_the_same_as_over_http() -> None:
    with client(tokens=Tokens(online=[Secret(KEY.encode(), "test")])) as (stub, _):
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.decode(text_request("go", max_tokens=2), timeout=60))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = [("authorization", f"Bearer {KEY}")]
        assert list(stub.decode(text_request("go", max_tokens=2), timeout=60, metadata=metadata))


def test_messages_are_those_of_google_jetstream_on_the_wire() -> None:
    theirs = pytest.importorskip("jetstream.core.proto.jetstream_pb2")

    def fields(descriptor: Any) -> list[tuple[Any, ...]]:
        """Everything that decides what travels."""
        found = [
            (field.full_name, field.number, field.type, field.is_repeated, field.containing_oneof and field.containing_oneof.name)
            for field in descriptor.fields
        ]
        return sorted(found) + [part for nested in sorted(descriptor.nested_types, key=lambda d: d.name) for part in fields(nested)]

    for name in ("DecodeRequest", "DecodeResponse", "HealthCheckRequest", "HealthCheckResponse"):
        assert fields(getattr(grpc_proto, name).DESCRIPTOR) == fields(getattr(theirs, name).DESCRIPTOR)
    assert SERVICE in {service.full_name for service in theirs.DESCRIPTOR.services_by_name.values()}
