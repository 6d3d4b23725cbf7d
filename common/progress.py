"""Progress bars with rate and time left; where no terminal is attached, a line now and then instead of a moving bar."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

TERMINAL_INTERVAL_S = 0.1
LOG_INTERVAL_S = 15.0
"""Between two lines in a log file, where every redraw is a new line."""


class ProgressBar:
    """Use as a context manager; `advance` counts one and shows figures, `count` takes and ignores what callbacks hand over."""

    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: BaseException | None, _traceback: TracebackType | None) -> None:
        self._bar.close()

    def advance(self, **figures: float) -> None:
        if figures:
            self._bar.set_postfix({name: f"{value:.3g}" for name, value in figures.items()}, refresh=False)
        self._bar.update()

    def count(self, _item: object) -> None:
        self._bar.update()


def progress_bar(name: str, total: int, unit: str, *, initial: int = 0, nested: bool = False) -> ProgressBar:
    """A bar over `total` units, `initial` of them done; a nested one vanishes at its end and shows only on a terminal."""
    is_terminal = sys.stderr.isatty()
    return ProgressBar(
        tqdm(
            desc=name,
            total=total,
            unit=unit,
            initial=initial,
            leave=not nested,
            disable=nested and not is_terminal,
            dynamic_ncols=True,
            mininterval=TERMINAL_INTERVAL_S if is_terminal else LOG_INTERVAL_S,
            maxinterval=LOG_INTERVAL_S,
        )
    )
