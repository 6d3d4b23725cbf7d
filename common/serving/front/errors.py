"""ApiError: what a client is told, in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}} and a status.

Every error of ours that a request can meet is mapped here, in one place. Invariant: a status of 500 or above is never the answer
to what a client sent, only to what happened to the server.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException

from common.errors import EngineClosedError, ReplicaUnavailableError, RequestRejectedError
from common.transfer.errors import TransferError, WrongBaseError

RETRY_AFTER_S = 1
"""Said to clients that are refused for now; a replica that drains is gone or back within about that."""
HTTP_ERRORS = {404: "not_found", 405: "method_not_allowed", 408: "request_timeout", 413: "body_too_large"}
"""What the web framework refuses by itself."""


class ApiError(Exception):
    """Ends one HTTP or gRPC call. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code

    def body(self) -> dict[str, object]:
        fields = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {name: None if text is None else printable(text) for name, text in fields.items()}}

    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def printable(text: str) -> str:
    """A text that can be sent: what clients sent may hold halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", code="service_unavailable")


def too_many(message: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded")


def unknown_model(model: str, served: str) -> ApiError:
    return ApiError(404, f"The model `{model}` does not exist; this server has `{served}`.", param="model", code="model_not_found")


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error that ended its request."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), code=HTTP_ERRORS.get(error.status_code))
        case RequestRejectedError():
            text = str(error).partition(": ")[2] or str(error)  # without the engine's own request id
            code = "context_length_exceeded" if "exceed the context" in text else None
            return ApiError(400, text, code=code)
        case ReplicaUnavailableError():
            return unavailable(str(error))
        case WrongBaseError():
            return ApiError(409, str(error), kind="conflict_error", code=type(error).__name__)
        case TransferError():
            return ApiError(424, str(error), kind="transfer_error", code=type(error).__name__)
        case ValueError():  # by the house's rule, what was asked for was wrong
            return ApiError(400, str(error))
        case EngineClosedError():
            return ApiError(503, f"the engine has failed: {error}", kind="server_error", code="engine_closed")
        case _:
            return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error", code="internal_error")
