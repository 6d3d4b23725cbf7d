"""Time as an argument: real code reads a Clock, policies take `now_s`, tests move a FakeClock by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back: advance({seconds}); give a number >= 0")
        self._now_s += seconds
