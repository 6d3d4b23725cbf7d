"""Answer: an HTTP response that does its work while its client is there, and gives everything back when the client leaves.

One body, or server-sent events from the first piece on. An error before the first byte becomes a status, one after it an event of
OpenAI's form; either way the client is told, and it ends with [DONE] as clients expect.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from common.serving.front.calls import STOPPED, Calls
from common.serving.front.errors import ApiError, api_error, unavailable

log = logging.getLogger(__name__)

JSON_HEADERS = [(b"content-type", b"application/json")]
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Outlet:
    """Where a call's answer goes. Sending waits while the client does not read."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streaming = False

    async def event(self, data: str) -> None:
        """Send one server-sent event."""
        if not self._streaming:
            self._streaming = True
            await self._send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        await self._send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})

    async def end_events(self) -> None:
        await self.event("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def body(self, content: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Send a whole JSON body."""
        fields = [
            *JSON_HEADERS,
            (b"content-length", str(len(content)).encode()),
            *((name.lower().encode(), value.encode()) for name, value in (headers or {}).items()),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})
        await self._send({"type": "http.response.body", "body": content, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """Tell the client what went wrong, in the form that what was sent so far allows."""
        if self._streaming:
            await self.event(json.dumps(error.body()))
            await self.end_events()
        else:
            await self.body(json.dumps(error.body()).encode(), status=error.status, headers=error.headers())


class Answer(Response):
    """See the module. `work` sends to the outlet; what it raises is the client's answer."""

    def __init__(self, calls: Calls, work: Callable[[Outlet], Awaitable[None]]) -> None:
        super().__init__()
        self._calls, self._work = calls, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet = Outlet(send)
        try:
            with self._calls.under_way():
                await self._while_client_is_there(outlet, receive)
        except Exception as error:
            answer = api_error(error)
            if answer.status >= 500 and answer.code == "internal_error":
                log.exception("%s %s failed", scope["method"], scope["path"])
            await outlet.fail(answer)

    async def _while_client_is_there(self, outlet: Outlet, receive: Receive) -> None:
        work = asyncio.ensure_future(self._work(outlet))
        watches = [asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._calls.stop_now.wait())]
        try:
            await asyncio.wait([work, *watches], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, *watches):
                if not task.done():
                    task.cancel()
            await asyncio.gather(work, *watches, return_exceptions=True)
        if not work.cancelled():
            work.result()
            return
        for watch in watches:  # a body that came too slowly, say
            if not watch.cancelled():
                watch.result()
        if self._calls.stop_now.is_set():
            raise unavailable(STOPPED)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
