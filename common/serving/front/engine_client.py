"""EngineClient: the front's end of the channel. Many requests at once, each with its tokens as they come and exactly one end.

It assigns the ids by which the engine knows requests, so that callers may name theirs as they like. What the engine holds at the
moment comes with every message and is read without asking. When the engine process is gone every request and call ends with an
error that says why.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from common.errors import EngineClosedError
from common.serving.coserving.statistics import DeviceReport
from common.serving.engine import EngineInfo, SampledToken
from common.serving.front.channel import Channel, ChannelClosedError, Message
from common.serving.front.messages import (
    completion_from_wire,
    load_from_wire,
    report_from_wire,
    request_to_wire,
    token_from_wire,
)
from common.serving.front.remote_errors import from_wire
from common.serving.loop import LoopCounters
from common.serving.replica import ReplicaLoad, StageReport
from common.types import Completion, Request


@dataclasses.dataclass(frozen=True)
class Ended:
    """A request's one end: its completion, or the error it was refused with or fell victim to."""

    completion: Completion | None
    error: Exception | None


OnEvent = Callable[[SampledToken | Ended], None]


class EngineClient:
    """See the module. Made by `connect`; `run` must be running, and returns why the engine is gone."""

    def __init__(self, channel: Channel, info: EngineInfo, state: dict[str, Any]) -> None:
        self.info = info
        self.failure: str | None = None
        """Why the engine is gone; None while it is there."""
        self.device: DeviceReport | None = None
        """What the device that it shares with another model decided and did, if it tells."""
        self._channel = channel
        self._listeners: dict[str, OnEvent] = {}
        self._calls: dict[str, asyncio.Future[Any]] = {}
        self._ids = itertools.count()
        self._set_state(state)

    @classmethod
    async def connect(cls, channel: Channel) -> EngineClient:
        """Wait until the engine says that it is ready.

        Raises:
            EngineClosedError: it failed first; the text is its own.
        """
        try:
            message = await channel.receive()
        except ChannelClosedError as error:
            raise EngineClosedError("the engine process ended before it was ready") from error
        if message["kind"] == "failed":
            raise EngineClosedError(message["text"])
        return cls(channel, EngineInfo(**message["info"]), message["state"])

    @property
    def load(self) -> ReplicaLoad:
        """As of the engine's newest message: never more than a step old while it works."""
        return self._load

    @property
    def counters(self) -> LoopCounters:
        return self._counters

    async def run(self, explain: Callable[[], Awaitable[str]] | None = None) -> str:
        """Take the engine's messages until it is gone; returns its own text, or what `explain` finds out."""
        text: str | None = None
        try:
            while True:
                message = await self._channel.receive()
                if message["kind"] == "failed":
                    text = message["text"]
                else:
                    self._take(message)
        except ChannelClosedError:
            self.failure = text or (await explain() if explain is not None else "the engine process is gone")
        error = EngineClosedError(self.failure)
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(Ended(completion=None, error=error))
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        return self.failure

    def start(self, request: Request, on_event: OnEvent, *, stream: bool) -> str:
        """Send a request; its tokens (if `stream`) and its one end go to `on_event`. Returns the id to abort it by."""
        request_id = str(next(self._ids))
        if self.failure is not None:
            on_event(Ended(completion=None, error=EngineClosedError(self.failure)))
            return request_id
        self._listeners[request_id] = on_event
        fields = request_to_wire(dataclasses.replace(request, request_id=request_id))
        self._channel.send({"kind": "generate", "id": request_id, "request": fields, "stream": stream})
        return request_id

    def abort(self, request_id: str) -> None:
        """Give a request up: its slot is free after the next step, and nothing more of it arrives. Ended ones change nothing."""
        if self._listeners.pop(request_id, None) is not None:
            self._channel.send({"kind": "abort", "id": request_id})

    async def generate(self, request: Request) -> Completion:
        """Run one request to its completion, under its own id; cancelling the call aborts it. Raises what the engine raised."""
        ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

        def on_event(event: SampledToken | Ended) -> None:
            if isinstance(event, Ended) and not ended.done():
                ended.set_result(event)

        request_id = self.start(request, on_event, stream=False)
        try:
            end = await ended
        finally:
            self.abort(request_id)
        if end.error is not None:
            raise end.error
        assert end.completion is not None
        return dataclasses.replace(end.completion, request_id=request.request_id)

    async def stage(self, version: int | None, store: str | None) -> StageReport:
        """Replica.stage, from the store at an address or from the one in use."""
        return report_from_wire(await self._call("stage", version=version, store=store))

    async def commit(self) -> int:
        return await self._call("commit")

    async def drain(self) -> None:
        await self._call("drain")

    async def resume(self) -> None:
        await self._call("resume")

    async def digests(self) -> dict[str, str]:
        """xxh3-128 of every live tensor's bits in the dtype that is published, by checkpoint name."""
        return await self._call("digests")

    async def step_times(self) -> list[tuple[float, float, int]]:
        """(end on the monotonic clock, device seconds, tokens) of the newest steps, oldest first."""
        return [(end_s, device_s, num_tokens) for end_s, device_s, num_tokens in await self._call("step_times")]

    async def decisions(self, seconds: float) -> list[dict[str, Any]]:
        """What a co-serving device decided lately, as events of Chrome's trace format.

        Raises:
            ValueError: the device has one model.
        """
        return await self._call("decisions", seconds=seconds)

    async def close(self) -> None:
        """Leave: the engine process then gives up what is in flight and ends."""
        await self._channel.close()

    async def _call(self, method: str, **arguments: Any) -> Any:
        if self.failure is not None:
            raise EngineClosedError(self.failure)
        call_id = str(next(self._ids))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        self._channel.send({"kind": "call", "id": call_id, "method": method, "arguments": arguments})
        try:
            return await future
        finally:
            del self._calls[call_id]

    def _take(self, message: Message) -> None:
        self._set_state(message["state"])
        match message["kind"]:
            case "step":
                for fields in message["tokens"]:
                    token = token_from_wire(fields)
                    listener = self._listeners.get(token.request_id)
                    if listener is not None:
                        listener(token)
            case "end":
                listener = self._listeners.pop(message["id"], None)
                if listener is not None:
                    listener(_ended(message))
            case "answer":
                future = self._calls.get(message["id"])
                if future is None or future.done():  # the caller has given up
                    return
                if "error" in message:
                    future.set_exception(from_wire(message["error"]))
                else:
                    future.set_result(message["value"])
            case "device":
                self.device = DeviceReport(**message["report"])
            case kind:
                raise AssertionError(f"the engine sent a message of unknown kind {kind!r}")

    def _set_state(self, state: dict[str, Any]) -> None:
        self._load = load_from_wire(state["load"])
        self._counters = LoopCounters(**state["counters"])


def _ended(message: Message) -> Ended:
    if "error" in message:
        return Ended(completion=None, error=from_wire(message["error"]))
    return Ended(completion=completion_from_wire(message["completion"]), error=None)
