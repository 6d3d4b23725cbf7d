"""EngineServer: the engine process's end of the channel. Token ids in, tokens out after every step; commands in between.

It runs on the event loop that drives the engine, so what it does delays steps: it unpacks token ids and does nothing else. Parsing,
text and clients are the front's. Messages, by their "kind":
  in: generate (id, request, stream), abort (id), call (id, method, arguments)
  out: hello, step (tokens, load, counters), end (id, completion or error), answer (id, value or error), device (report), failed
Invariant: every "generate" is answered by one "end" unless it was aborted, and when the front is gone nothing of it goes on.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from common.errors import EngineClosedError
from common.serving.coserving.decision_trace import DecisionTrace
from common.serving.coserving.statistics import DeviceReport
from common.serving.engine import EngineInfo, StepResult
from common.serving.front.channel import Channel, ChannelClosedError, Message
from common.serving.front.messages import completion_to_wire, load_to_wire, report_to_wire, request_from_wire, token_to_wire
from common.serving.front.remote_errors import to_wire
from common.serving.replica import LocalReplica
from common.transfer.errors import UnreachableError
from common.transfer.subscriber import Subscriber
from common.transfer.target import WeightTarget

NUM_STEP_TIMES = 4096
"""Steps whose ends are kept for whoever asks how evenly they came."""
EVENTS_A_PASS = 25
"""Of a trace of decisions, made in one pass of the event loop: some passes, so about a millisecond, come between two steps."""
MAX_READ_ELEMENTS = 1 << 22
"""Elements of a tensor that are read at a time for its digest."""


class EngineServer:
    """See the module. `serve` returns when the front is gone.

    Args:
        replica: already entered.
        target: the live weights, for digests.
        subscribe: makes a subscriber to the store at an address, of which it knows the kinds.
        store: address of the store that the replica follows now.
        decisions: of the device that this replica shares with another, for whoever asks why.
    """

    def __init__(
        self,
        channel: Channel,
        replica: LocalReplica[Any],
        target: WeightTarget,
        *,
        info: EngineInfo,
        subscribe: Callable[[str], Subscriber],
        store: str | None = None,
        decisions: DecisionTrace | None = None,
    ) -> None:
        self._channel, self._replica, self._target, self._subscribe = channel, replica, target, subscribe
        self._info, self._store, self._decisions = info, store, decisions
        self._requests: dict[str, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._streamed: set[str] = set()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._staging, self._showing = asyncio.Lock(), asyncio.Lock()
        self._step_times: collections.deque[tuple[float, float, int]] = collections.deque(maxlen=NUM_STEP_TIMES)
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "stage": self._stage,
            "commit": self._commit,
            "drain": self._drain,
            "resume": self._resume,
            "digests": self._digests,
            "step_times": self._recent_steps,
            "decisions": self._recent_decisions,
        }

    async def serve(self) -> None:
        """Answer the front until it is gone.

        Raises:
            EngineClosedError: the engine failed. The front has been told.
        """
        self._replica.watch_steps(self._on_step)
        self._channel.send({"kind": "hello", "info": vars(self._info), "state": self._state()})
        reading = asyncio.create_task(self._read())
        try:
            ends: list[asyncio.Future[Any]] = [reading, self._failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                await asyncio.gather(*self._requests.values(), return_exceptions=True)  # each ends with the error
                self._channel.send({"kind": "failed", "text": self._failed.result()})
                raise EngineClosedError(self._failed.result())
            await reading
        finally:
            tasks = [reading, *self._requests.values(), *self._calls]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._channel.close()

    def tell_of_device(self, report: DeviceReport) -> None:
        """Send what the device that two models share decided and did; to be called while `serve` runs."""
        self._channel.send({"kind": "device", "report": vars(report), "state": self._state()})

    async def _read(self) -> None:
        while True:
            try:
                message = await self._channel.receive()
            except ChannelClosedError:
                return
            self._take(message)

    def _take(self, message: Message) -> None:
        match message["kind"]:
            case "generate":
                request_id = message["id"]
                if message["stream"]:
                    self._streamed.add(request_id)
                task = asyncio.create_task(self._generate(request_id, message["request"]))
                self._requests[request_id] = task
                task.add_done_callback(lambda _: self._forget(request_id))  # also if it is cancelled before it ran
            case "abort":
                if message["id"] in self._requests:
                    self._requests[message["id"]].cancel()
            case "call":
                call = asyncio.create_task(self._call(message["id"], message["method"], message["arguments"]))
                self._calls.add(call)
                call.add_done_callback(self._calls.discard)
            case kind:
                raise AssertionError(f"the front sent a message of unknown kind {kind!r}")

    async def _generate(self, request_id: str, fields: dict[str, Any]) -> None:
        try:
            completion = await self._replica.generate(request_from_wire(fields))
            self._end(request_id, completion=completion_to_wire(completion))
        except Exception as error:
            self._end(request_id, error=to_wire(error))
            if isinstance(error, EngineClosedError) and not self._failed.done():
                self._failed.set_result(str(error))

    def _forget(self, request_id: str) -> None:
        del self._requests[request_id]
        self._streamed.discard(request_id)

    def _end(self, request_id: str, **result: Any) -> None:
        self._channel.send({"kind": "end", "id": request_id, "state": self._state(), **result})

    async def _call(self, call_id: int, method: str, arguments: dict[str, Any]) -> None:
        try:
            value = await self._methods[method](**arguments)
            self._channel.send({"kind": "answer", "id": call_id, "value": value, "state": self._state()})
        except Exception as error:
            self._channel.send({"kind": "answer", "id": call_id, "error": to_wire(error), "state": self._state()})

    def _on_step(self, result: StepResult) -> None:
        self._step_times.append((time.monotonic(), result.device_s, len(result.tokens)))
        tokens = [token_to_wire(token) for token in result.tokens if token.request_id in self._streamed]
        self._channel.send({"kind": "step", "tokens": tokens, "state": self._state()})

    def _state(self) -> dict[str, Any]:
        return {"load": load_to_wire(self._replica.load()), "counters": vars(self._replica.counters)}

    async def _stage(self, version: int | None, store: str | None) -> dict[str, Any]:
        async with self._staging:
            if store is None or store == self._store:
                return report_to_wire(await self._replica.stage(version))
            try:
                if "://" not in store and not Path(store).is_dir():  # to open it would make the folder, wherever that is
                    raise ValueError(f"store {store!r} is no folder on this machine; name one that has been published to, or a URL")
                subscriber = self._subscribe(store)
            except (ImportError, OSError) as error:  # a kind of address that needs a package, or one that cannot be
                raise ValueError(f"store {store!r} cannot be used: {error}") from error
            before = await self._replica.follow(subscriber)
            try:
                report = await self._replica.stage(version)
            except BaseException as error:
                await self._replica.follow(before)  # a store that brings nothing is not kept
                subscriber.close()
                if isinstance(error, OSError):
                    raise UnreachableError(f"store {store!r}: {error}") from error
                raise
            before.close()
            self._store = store
            return report_to_wire(report)

    async def _commit(self) -> int:
        return await self._replica.commit()

    async def _drain(self) -> None:
        await self._replica.drain()

    async def _resume(self) -> None:
        await self._replica.resume()

    async def _recent_steps(self) -> list[tuple[float, float, int]]:
        return list(self._step_times)

    async def _recent_decisions(self, seconds: float) -> list[dict[str, Any]]:
        if self._decisions is None:
            raise ValueError("this replica has a device of its own, so nothing is decided; start it with --coserve for that")
        found = []
        async with self._showing:  # two at once would take twice as much between two steps
            for event in self._decisions.chrome_events(time.monotonic() - seconds):
                found.append(event)
                if len(found) % EVENTS_A_PASS == 0:
                    await asyncio.sleep(0)  # a step, if one is due
        return found

    async def _digests(self) -> dict[str, str]:
        """The xxh3-128 of every live tensor's bits in the dtype that is published, none of them in the middle of a commit."""
        return await self._replica.while_nothing_is_committed(lambda: {name: self._digest(name) for name in self._target.specs()})

    def _digest(self, name: str) -> str:
        shape, _ = self._target.specs()[name]
        num_elements = int(np.prod(shape, dtype=np.int64))
        digest = xxhash.xxh3_128()
        for start in range(0, num_elements, MAX_READ_ELEMENTS):
            positions = np.arange(start, min(start + MAX_READ_ELEMENTS, num_elements), dtype=np.uint64)
            digest.update(np.ascontiguousarray(self._target.read(name, positions)).data)
        return digest.hexdigest()
