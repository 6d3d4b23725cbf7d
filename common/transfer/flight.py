"""Flight: one object on its way through a relay, read by many while it arrives.

It is fetched once and whole, whatever ranges are asked for. Who wants bytes while they come gets them unchecked, and none is taken
back: should the source begin again, readers go on where they are. Who does not, gets its range when the whole object was checked.
"""

from __future__ import annotations

import threading
import time

from common.transfer.errors import TransferError, TransferTimeoutError
from common.transfer.manifest import UpdateHead
from common.transfer.store.protocol import Arrived


class Flight:
    """One thread tells it what comes (`arrived`, `finish`, `fail`), any number wait for ranges of it (`wait`)."""

    def __init__(self, head: UpdateHead, name: str, front_bytes: int | None = None) -> None:
        """`front_bytes`: bring the first so many bytes only; None: all of it."""
        self.head, self.name, self.front_bytes = head, name, front_bytes
        self.num_readers = 0
        """Kept by the relay, under its lock."""
        self.waits = False
        """Set by the relay when it has asked for the object."""
        self._content = memoryview(b"")
        self._num_bytes: int | None = None
        self._landed = False
        self._error: TransferError | None = None
        self._news = threading.Condition()

    def arrived(self, content: memoryview, num_bytes: int) -> None:
        """So much has come, of so many bytes. Less than before (the source began again) changes nothing for those who read."""
        with self._news:
            if len(content) > len(self._content) or self._num_bytes != num_bytes:
                self._content, self._num_bytes = content, num_bytes
                self._news.notify_all()

    def finish(self, content: memoryview) -> None:
        """This is the object, whole and as good as it can be had."""
        with self._news:
            self._landed = True
            self._content, self._num_bytes = content, len(content)
            self._news.notify_all()

    def fail(self, error: TransferError) -> None:
        """It will not come."""
        with self._news:
            self._error = error
            self._news.notify_all()

    def wait(self, start: int, length: int | None, timeout_s: float, stall_s: float, arrived: Arrived | None) -> memoryview:
        """A range of the object.

        Args:
            timeout_s: how long nothing of it may be here.
            stall_s: how long nothing more may come once something is.
            arrived: called from this thread whenever more of the range is here. None: the range is wanted checked.
        """
        seen = 0
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._news:
                while True:
                    content, num_bytes = self._part(start, length)
                    if self._landed or (arrived is not None and len(content) == num_bytes):
                        return content
                    here = len(self._content) if arrived is None else len(content)
                    if num_bytes is not None and here > seen:
                        break
                    if self._error is not None:
                        raise self._error
                    if not self._news.wait(deadline_s - time.monotonic()):
                        what = f"{self.head.key.path}/{self.name}"
                        raise TransferTimeoutError(f"{what} did not come within {timeout_s} s")
            seen = here
            deadline_s = time.monotonic() + stall_s
            if arrived is not None:
                assert num_bytes is not None
                arrived(content, num_bytes)

    def _part(self, start: int, length: int | None) -> tuple[memoryview, int | None]:
        """What is here of a range, and its length once that is known."""
        if self._num_bytes is None:
            return self._content, None
        end = self._num_bytes if length is None else min(start + length, self._num_bytes)
        return self._content[start:end], max(end - start, 0)
