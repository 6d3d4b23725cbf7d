"""Channel: whole messages of plain values (msgpack) between the front process and the engine process, over a socket pair.

Nothing is pickled. The end of either process closes the socket, which the other sees at once: so ownership of requests needs no
heartbeat. Invariant: messages arrive whole and in order, or `ChannelClosedError` says that none will.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any

import msgpack

from common.errors import RoseError

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 28
"""Far above any real message: a larger length means that the two ends do not speak the same format."""

Message = dict[str, Any]
"""What stands under "kind" says what else is there; see EngineServer."""


class ChannelClosedError(RoseError):
    """The other end is gone."""


class Channel:
    """One end. `send` never blocks: what the other end has not taken yet is kept, which the tokens in flight bound."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """A channel over one end of a socket pair, whose owner it becomes."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    async def receive(self) -> Message:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            assert length <= MAX_MESSAGE_BYTES, f"a message of {length} bytes: the two ends do not run the same version"
            message = msgpack.unpackb(await self._reader.readexactly(length), strict_map_key=False, use_list=True)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise ChannelClosedError("the other process has closed the channel") from error
        assert isinstance(message, dict), f"a message is a map, not {type(message).__name__}"
        return message

    def send(self, message: Message) -> None:
        """Does nothing when the other end is gone: `receive` says so."""
        payload = msgpack.packb(message)
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(payload)) + payload)

    async def close(self) -> None:
        """Send what waits, then close. Idempotent."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
