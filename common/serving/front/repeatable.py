"""RepeatableCalls: several attempts at one call share one execution and one answer.

A client whose connection broke tries again with the same key: it joins the call if that is still under way, or gets the answer that
it missed. A call that nobody waits for any more is cancelled; one that failed is forgotten, so that the next attempt starts afresh.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")

NUM_ANSWERS_KEPT = 4096
"""Answers that can still be asked for again: far more than one client has under way."""


@dataclasses.dataclass
class _Call(Generic[ResultT]):
    task: asyncio.Task[ResultT]
    num_waiting: int = 0


class RepeatableCalls(Generic[ResultT]):
    """See the module."""

    def __init__(self, num_kept: int = NUM_ANSWERS_KEPT) -> None:
        self._num_kept = num_kept
        self._calls: OrderedDict[str, _Call[ResultT]] = OrderedDict()

    async def run(self, key: str, start: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """The answer of the call named `key`, made by `start` unless there is one already. Raises what the call raised."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(asyncio.create_task(start()))
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if not call.num_waiting:
                self._settle(key, call)

    def _settle(self, key: str, call: _Call[ResultT]) -> None:
        """Nobody waits for `call` now: keep its answer for a while, or drop it."""
        if not call.task.done():
            call.task.cancel()
        if self._calls.get(key) is not call:
            return
        if not call.task.done() or call.task.cancelled() or call.task.exception() is not None:
            del self._calls[key]
            return
        self._calls.move_to_end(key)
        while len(self._calls) > self._num_kept:
            oldest = next(iter(self._calls))
            if not self._calls[oldest].task.done():
                break
            del self._calls[oldest]
