"""JetStream's Orchestrator service (Decode, HealthCheck) over the same front as HTTP: same engine, limits and API keys.

Its requests say neither temperature nor seed, so decoding is greedy, as JetStream's own default. Text comes back for text, token
ids for token ids. What it refuses: `session_cache`, which names a conversation kept on the server. `priority` is taken and has no
effect, as in JetStream: clients do not choose who goes first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from common.serving.front.access import Client, Interface
from common.serving.front.errors import ApiError, api_error
from common.serving.front.front import Front
from common.serving.front.generation import Generation, Piece
from common.types import SamplingParams
from rose_jax.jetstream.grpc_proto import SERVICE, DecodeRequest, DecodeResponse, HealthCheckRequest, HealthCheckResponse

STATUS_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
STOP_GRACE_S = 2.0
"""Time for streams to take what was sent, once every call has its answer."""


class Orchestrator:
    """The two methods of the service."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Decode(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:  # noqa: N802 (gRPC's name)
        """Stream a completion; the client that leaves ends it."""
        try:
            with self._front.calls.under_way():
                client = self._identify(context)
                prompt = self._prompt(request)
                sends_text = request.WhichOneof("content") == "text_content"
                async for piece in self._pieces(client, prompt, request.max_tokens):
                    yield _response(piece, with_text=sends_text)
        except Exception as error:
            answer = api_error(error)
            await context.abort(STATUS_CODES.get(answer.status, grpc.StatusCode.INTERNAL), answer.message)

    async def HealthCheck(self, _request: Any, _context: grpc.aio.ServicerContext) -> Any:  # noqa: N802 (gRPC's name)
        """Whether a completion asked for now would be taken."""
        engine, load = self._front.engine, self._front.engine.load
        takes = not self._front.calls.draining and not load.draining and load.weight_version is not None
        return HealthCheckResponse(is_live=engine.failure is None and takes)

    def _identify(self, context: grpc.aio.ServicerContext) -> Client:
        metadata = dict(context.invocation_metadata() or ())
        peer = context.peer().rpartition(":")[0]  # without the port: a client has many connections
        return self._front.tokens.identify(Interface.ONLINE, metadata.get("authorization"), peer)

    def _prompt(self, request: Any) -> list[int]:
        if request.session_cache:
            raise ApiError(400, f"session_cache={request.session_cache!r} is not supported: send the whole conversation as content")
        content = request.WhichOneof("content")
        if content is None:
            raise ApiError(400, "the request has no content; set text_content or token_content")
        if content == "text_content":
            prompt = self._front.tokenizer.encode_text(request.text_content.text)
        else:
            prompt = list(request.token_content.token_ids)
        self._front.check_prompt(prompt, param=content)
        return prompt

    async def _pieces(self, client: Client, prompt: list[int], max_tokens: int) -> AsyncIterator[Piece]:
        front = self._front
        if max_tokens < 0:
            raise ApiError(400, f"max_tokens={max_tokens} must be at least 1, or 0 for as many as the context holds")
        longest = front.max_completion_tokens(len(prompt), param="content")
        sampling = SamplingParams(
            max_tokens=max_tokens or longest, temperature=0.0, stop_token_ids=tuple(front.tokenizer.stop_token_ids)
        )
        requests = front.online_requests(client, [prompt], 1, [sampling], seed=0)
        metrics = front.metrics.call(Interface.ONLINE, num_prompt_tokens=len(prompt))
        generation = Generation(front.engine, front.tokenizer, requests, stops=(), metrics=metrics)
        with front.concurrency.hold(client, 1), generation:
            async for piece in front.calls.unless_stopped(generation.pieces()):
                yield piece


def _response(piece: Piece, *, with_text: bool) -> Any:
    sample = DecodeResponse.StreamContent.Sample(token_ids=[token.token_id for token in piece.tokens])
    if with_text:
        sample.text = piece.text
    return DecodeResponse(stream_content=DecodeResponse.StreamContent(samples=[sample]))


class GrpcServer:
    """The service on a port of its own. `start` and `stop` on the event loop of the front."""

    def __init__(self, front: Front, *, host: str, port: int, certificate: Path | None = None, key: Path | None = None) -> None:
        """
        Raises:
            ValueError: the address cannot be had.
        """
        options = [
            ("grpc.max_receive_message_length", front.limits.max_body_bytes),
            ("grpc.so_reuseport", 0),  # else two replicas on one port share its calls, whosever they are
        ]
        self._server = grpc.aio.server(options=options)
        service = Orchestrator(front)
        handlers = {
            "Decode": grpc.unary_stream_rpc_method_handler(
                service.Decode,
                request_deserializer=DecodeRequest.FromString,
                response_serializer=DecodeResponse.SerializeToString,
            ),
            "HealthCheck": grpc.unary_unary_rpc_method_handler(
                service.HealthCheck,
                request_deserializer=HealthCheckRequest.FromString,
                response_serializer=HealthCheckResponse.SerializeToString,
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None or key is None:
                self.port = self._server.add_insecure_port(address)
            else:
                pair = (key.read_bytes(), certificate.read_bytes())
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise ValueError(f"--grpc_port={port} cannot be listened on at {host}: {error}; name another") from error

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        """After the front's calls have ended."""
        await self._server.stop(STOP_GRACE_S)
