"""Calls: everything that clients have under way, and the two ways of ending it: let it finish, or end it now with an answer.

Invariant: a call that was let in gets an answer of its own, also when the server is told to stop twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

from common.serving.front.errors import unavailable

ItemT = TypeVar("ItemT")

DRAINING = "this server is shutting down and takes no new request; send it elsewhere or try again"
STOPPED = "this server was told to stop at once, so this request was ended; send it elsewhere or try again"


class Calls:
    """See the module."""

    def __init__(self) -> None:
        self.draining = False
        self.stop_now = asyncio.Event()
        """Set when calls under way are to end with an error."""
        self._num_under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Raises ApiError 503 if no new call is taken."""
        if self.draining:
            raise unavailable(DRAINING)
        self._num_under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_under_way -= 1
            if not self._num_under_way:
                self._idle.set()

    async def unless_stopped(self, items: AsyncIterator[ItemT]) -> AsyncIterator[ItemT]:
        """The items as they come. Raises ApiError 503 as soon as calls are to end."""
        stopped = asyncio.create_task(self.stop_now.wait())
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(items, None))
                try:
                    await asyncio.wait({upcoming, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not upcoming.done():
                        upcoming.cancel()
                        await asyncio.gather(upcoming, return_exceptions=True)
                if upcoming.cancelled():
                    raise unavailable(STOPPED)
                item = upcoming.result()
                if item is None:
                    return
                yield item
        finally:
            stopped.cancel()

    async def drain(self) -> None:
        """Take no new call and wait for those under way."""
        self.draining = True
        await self._idle.wait()
