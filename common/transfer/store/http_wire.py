"""What HTTP client and server agree on: paths, limits, and which status stands for which error.

  GET    /catalog?after=TAG&wait_s=S         GET  /confirmations
  GET    /v7/delta/b00000?wait_s=S           with Range; 204 if it did not come within S, 503 if it could not
  PUT    /v7/delta/b00000                    with a token, always
  POST   /open /fail /remove                 with a token, always; JSON
  POST   /lease /release /confirm            JSON
  POST   /peer                               JSON, to a relay that knows the replicas (see common.transfer.peers)

Answers that are no success carry the reason as text.
"""

from __future__ import annotations

import re

from common.transfer.errors import (
    AuthenticationError,
    FarSideError,
    MalformedUpdateError,
    TransferError,
    TransferTimeoutError,
    UnreachableError,
    VersionGoneError,
)
from common.transfer.manifest import MAX_LAYOUT_BYTES, UpdateKey, UpdateKind

MAX_WAIT_S = 20.0
"""A server answers within this, with or without news: connections through proxies do not live much longer in silence."""
MAX_JSON_BYTES = 64 << 20
MAX_POST_BYTES = 64 << 10
MAX_ERROR_BYTES = 8192
MAX_OBJECT_BYTES = MAX_LAYOUT_BYTES

UNREACHABLE_STATUS = 503
"""A relay cannot reach the store behind it, or not in time: asking again may help."""

_OBJECT_PATH = re.compile(r"/v([0-9]{1,16})/(delta|anchor)/([a-z0-9]{1,16})")

STATUS_OF: dict[type[TransferError], int] = {
    MalformedUpdateError: 400,
    AuthenticationError: 401,
    FarSideError: 409,
    VersionGoneError: 410,
    UnreachableError: UNREACHABLE_STATUS,
    TransferTimeoutError: UNREACHABLE_STATUS,
}


def parse_object_path(path: str) -> tuple[UpdateKey, str] | None:
    match = _OBJECT_PATH.fullmatch(path)
    return (UpdateKey(int(match[1]), UpdateKind(match[2])), match[3]) if match else None


def status_of(error: TransferError) -> int:
    return next((status for kind, status in STATUS_OF.items() if isinstance(error, kind)), 500)


def error_of(status: int, text: str, what: str) -> TransferError:
    """The error that a status stands for; anything unknown is the far side's own failure."""
    for kind, known in STATUS_OF.items():
        if status == known and kind is not MalformedUpdateError:
            return kind(f"{what}: {text}")
    return FarSideError(f"{what}: HTTP {status}: {text}")
