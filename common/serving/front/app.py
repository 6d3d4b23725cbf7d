"""The HTTP application: all interfaces of one front, their errors in OpenAI's form, and limits on what a body may be.

Its OpenAPI document at /openapi.json says what every endpoint takes and answers; tests hold it to what the server does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.serving.front import openai_api, rollout_api
from common.serving.front.access import Interface
from common.serving.front.calls import DRAINING
from common.serving.front.errors import ApiError, api_error, unavailable
from common.serving.front.front import Front
from common.serving.front.openai_types import SCHEMA_REFERENCE, ErrorResponse

TITLE = "ROSE replica"
BODY_TIMEOUT_S = 30.0
"""A body that takes longer to arrive is given up, so that slow senders hold nothing."""
DISCARD_S = 2.0
"""How long a body that is refused is read and thrown away."""
METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    status: str
    weight_version: int | None


def make_app(front: Front) -> ASGIApp:
    app = FastAPI(title=TITLE, docs_url=None, redoc_url=None)
    app.include_router(openai_api.router(front))
    app.include_router(rollout_api.router(front))

    @app.get("/health", response_model=Health, responses={503: {"model": ErrorResponse, "description": "Not serving"}})
    async def health() -> Health:
        """Whether a completion asked for now would be taken."""
        load = front.engine.load
        if front.engine.failure is not None:
            raise unavailable(front.engine.failure)
        if front.calls.draining or load.draining:
            raise unavailable(DRAINING)
        if load.weight_version is None:
            raise unavailable("no weights yet: stage and commit a version first")
        return Health(status="ok", weight_version=load.weight_version)

    @app.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Prometheus text"}, 401: openai_api.ERRORS[401]},
    )
    async def metrics(request: HttpRequest) -> Response:
        """For Prometheus; wants the token of online clients if they need one."""
        openai_api.identify(front, request, Interface.ONLINE)
        return Response(front.metrics.text(), media_type=METRICS_MEDIA_TYPE)

    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return BodyLimits(app, max_bytes=front.limits.max_body_bytes)


async def _on_error(_request: HttpRequest, error: Exception) -> Response:
    answer = _validation_error(error) if isinstance(error, RequestValidationError) else api_error(error)
    return JSONResponse(answer.body(), status_code=answer.status, headers=answer.headers())


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, in words."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:] if isinstance(part, str)]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json")
    param = where[0] if where else None
    problem = first["msg"].removeprefix("Value error, ")
    text = problem if param is None else f"'{'.'.join(where)}': {problem}"
    return ApiError(400, text, param=param, code="invalid_value")


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the types of streamed events, and without its own form of validation errors, which is not ours."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        for event in openai_api.EVENTS.values():
            schema = event.model_json_schema(ref_template=SCHEMA_REFERENCE, mode="serialization")
            document["components"]["schemas"] |= schema.pop("$defs", {}) | {event.__name__: schema}
        app.openapi_schema = document
    return app.openapi_schema


class BodyLimits:
    """Refuses bodies that are too large or too slow, before anything is parsed."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app, self._max_bytes, self._timeout_s = app, max_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await _discard_body(receive)
            await self._refuse(self._too_large(int(announced)), send)
            return
        num_bytes, deadline_s, complete = 0, time.monotonic() + self._timeout_s, False

        async def limited() -> Message:
            nonlocal num_bytes, complete
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"the body took longer than {self._timeout_s:g} s") from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                await _discard_body(receive)
                raise self._too_large(num_bytes)
            complete = not message.get("more_body", False)
            return message

        await self._app(scope, limited, send)

    def _too_large(self, num_bytes: int) -> HTTPException:
        return HTTPException(413, f"the body has {num_bytes} bytes or more, this server takes {self._max_bytes}")

    @staticmethod
    async def _refuse(error: HTTPException, send: Send) -> None:
        body = json.dumps(api_error(error).body()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": error.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _discard_body(receive: Receive) -> None:
    """Let a client that sends before it reads get its answer: closing on unread bytes would reset the connection first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            while (await receive()).get("more_body", False):
                pass
