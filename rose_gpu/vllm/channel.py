"""The command channel between an engine's owner and the process that runs vLLM: framed JSON, with bytes beside it where needed.

One end asks, the other answers in order; some commands have no answer. Both ends are ours and run the same version; still, what is
read is only parsed, never evaluated. Invariant: after an error on the socket neither end uses it again.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from common.errors import RoseError

_HEAD = struct.Struct("<QQ")
MAX_FIELDS_BYTES = 1 << 30
"""A longer message is taken for a broken one."""


class ChannelClosedError(RoseError):
    """The other end is gone."""


class Channel:
    """One end of a connected stream socket, which it owns."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, fields: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        text = json.dumps(fields).encode()
        try:
            self._socket.sendall(_HEAD.pack(len(text), len(payload)) + text)
            if len(payload):
                self._socket.sendall(payload)
        except OSError as error:
            raise ChannelClosedError(f"sending {fields.get('method', 'an answer')}: {error}") from error

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """Wait for the next message.

        Raises:
            ChannelClosedError: the other end closed, or sent what is no message.
        """
        text_bytes, payload_bytes = _HEAD.unpack(self._exactly(_HEAD.size))
        if text_bytes > MAX_FIELDS_BYTES:
            raise ChannelClosedError(f"a message of {text_bytes} bytes: the two ends do not speak the same protocol")
        fields = json.loads(bytes(self._exactly(text_bytes)))
        return fields, self._exactly(payload_bytes)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, num_bytes: int) -> memoryview:
        buffer = memoryview(bytearray(num_bytes))
        done = 0
        while done < num_bytes:
            try:
                received = self._socket.recv_into(buffer[done:])
            except OSError as error:
                raise ChannelClosedError(f"receiving: {error}") from error
            if not received:
                raise ChannelClosedError("the other end closed the channel")
            done += received
        return buffer
