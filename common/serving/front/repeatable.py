"""RepeatableCalls: several attempts at one call share one execution and one answer.

A client whose connection broke tries again with the same key: it joins the call if that is still under way, or gets the answer that
it missed. A call that nobody waits for any more is cancelled; one that failed is forgotten, so that the next attempt starts afresh.
Answers are kept up to a size in all, the newest ones, whatever else is under way.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclasses.dataclass
class _Call(Generic[ResultT]):
    task: asyncio.Task[ResultT]
    num_waiting: int = 0


class RepeatableCalls(Generic[ResultT]):
    """See the module. `size_of` says what an answer counts against `max_kept`."""

    def __init__(self, size_of: Callable[[ResultT], int], *, max_kept: int) -> None:
        self._size_of, self._max_kept = size_of, max_kept
        self._calls: dict[Hashable, _Call[ResultT]] = {}
        self._kept: OrderedDict[Hashable, int] = OrderedDict()  # sizes of answers that nobody waits for, oldest first
        self._kept_size = 0

    async def run(self, key: Hashable, start: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """The answer of the call named `key`, made by `start` unless there is one already. Raises what the call raised."""
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(asyncio.create_task(start()))
        self._kept_size -= self._kept.pop(key, 0)
        call.num_waiting += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.num_waiting -= 1
            if not call.num_waiting:
                self._settle(key, call)

    def _settle(self, key: Hashable, call: _Call[ResultT]) -> None:
        """Nobody waits for `call` now: keep its answer for a while, or drop it."""
        if not call.task.done():
            call.task.cancel()
        if self._calls.get(key) is not call:
            return
        if not call.task.done() or call.task.cancelled() or call.task.exception() is not None:
            del self._calls[key]
            return
        self._kept[key] = self._size_of(call.task.result())
        self._kept_size += self._kept[key]
        while self._kept_size > self._max_kept:
            oldest, size = self._kept.popitem(last=False)
            self._kept_size -= size
            del self._calls[oldest]
