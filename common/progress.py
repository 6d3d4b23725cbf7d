"""Progress bars with rate and time left; where no terminal is attached, a line now and then instead of a moving bar.

Everything goes to stderr, so that stdout holds results alone.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, TextIO

from tqdm import tqdm

from common.clock import Clock, MonotonicClock

TERMINAL_INTERVAL_S = 0.1
LOG_INTERVAL_S = 15.0
"""Between two lines in a log file; the last one comes at the end."""
LOG_FORMAT = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class _Bar(Protocol):
    """What ProgressBar needs of tqdm."""

    def set_postfix_str(self, s: str, refresh: bool) -> object: ...

    def update(self) -> object: ...

    def close(self) -> None: ...


class LogLines:
    """A bar for log files: whole lines, at most one in LOG_INTERVAL_S besides the last."""

    def __init__(self, name: str, total: int, unit: str, *, initial: int, file: TextIO, clock: Clock | None = None) -> None:
        self._name, self._total, self._unit, self._initial = name, total, unit, initial
        self._file, self._clock = file, clock or MonotonicClock()
        self._num_done = initial
        self._postfix = ""
        self._started_s = self._printed_s = self._clock.now_s()

    def set_postfix_str(self, s: str, refresh: bool) -> None:
        self._postfix = s

    def update(self) -> None:
        self._num_done += 1
        if self._clock.now_s() - self._printed_s >= LOG_INTERVAL_S and self._num_done < self._total:
            self._print()

    def close(self) -> None:
        if self._num_done > self._initial:
            self._print()

    def _print(self) -> None:
        self._printed_s = self._clock.now_s()
        line = tqdm.format_meter(
            self._num_done,
            self._total,
            self._printed_s - self._started_s,
            prefix=self._name,
            unit=self._unit,
            postfix=self._postfix,
            initial=self._initial,
            bar_format=LOG_FORMAT,
        )
        print(line, file=self._file, flush=True)


class ProgressBar:
    """Use as a context manager; `advance` counts one and shows figures, `count` takes and ignores what callbacks hand over."""

    def __init__(self, bar: _Bar) -> None:
        self._bar = bar

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        self._bar.close()

    def advance(self, **figures: float) -> None:
        if figures:
            self._bar.set_postfix_str(", ".join(f"{name}={value:.3g}" for name, value in figures.items()), refresh=False)
        self._bar.update()

    def count(self, _item: object) -> None:
        self._bar.update()


def progress_bar(name: str, total: int, unit: str, *, initial: int = 0, nested: bool = False) -> ProgressBar:
    """A bar over `total` units, `initial` of them done; a nested one vanishes at its end and shows only on a terminal."""
    if sys.stderr.isatty() or nested:
        bar = tqdm(
            desc=name,
            total=total,
            unit=unit,
            initial=initial,
            leave=not nested,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            mininterval=TERMINAL_INTERVAL_S,
        )
        return ProgressBar(bar)
    return ProgressBar(LogLines(name, total, unit, initial=initial, file=sys.stderr))
