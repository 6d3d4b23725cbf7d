"""A version on its way from the learner, and what it cost once it has arrived."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What one published version cost. `wire_bytes` are those of its delta (or of its anchor, where it has no delta)."""

    version: int
    base_version: int | None
    dense_bytes: int
    wire_bytes: int
    changed_elements: int
    num_elements: int
    encode_s: float

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.changed_elements / max(self.num_elements, 1)


class Publication:
    """A version on its way."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._released = threading.Event()
        self._done: concurrent.futures.Future[PublishReport] = concurrent.futures.Future()

    def wait_released(self, timeout_s: float | None = None) -> bool:
        """Wait until the arrays that were handed over are no longer read. False if that takes longer than `timeout_s`."""
        return self._released.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> PublishReport:
        """Wait until receivers can have all of it; raises what stopped it, or TimeoutError."""
        return self._done.result(timeout_s)
