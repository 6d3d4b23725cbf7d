"""Caution: how much the admission controller dares, lowered by surprises and misses, raised again only after calm.

OPEN spends slack; IDLE_ONLY lets rollouts run only when serving has nothing to do; STOPPED lets none run. A surprise is a rollout
step that took longer than its bound; a blamed miss is an objective missed by no more than what rollouts took from the
request. Time and counts come in as arguments. Invariant: after `max_surprises` surprises among the newest `window_steps` rollout
steps no rollout runs until a pause is over; each pause is twice the one before, up to a longest, until there has been calm.
"""

from __future__ import annotations

import collections
import dataclasses

from common.serving.coserving.events import Level


@dataclasses.dataclass(frozen=True, kw_only=True)
class CautionSettings:
    """Counts are of the newest `window_steps` rollout steps and `window_requests` ended online requests."""

    window_steps: int = 64
    cautious_surprises: int = 6
    max_surprises: int = 12
    window_requests: int = 64
    cautious_blamed: int = 2
    max_missed_share: float = 0.5
    """More missed, whoever is to blame: nothing is left to give away."""
    shortest_pause_s: float = 1.0
    longest_pause_s: float = 32.0
    calm_s: float = 10.0
    """A cautious level is left after so long without cause."""

    def __post_init__(self) -> None:
        if not 0 < self.cautious_surprises <= self.max_surprises <= self.window_steps:
            raise ValueError(
                f"0 < cautious_surprises={self.cautious_surprises} <= max_surprises={self.max_surprises} <= "
                f"window_steps={self.window_steps} must hold"
            )
        if not 0 < self.shortest_pause_s <= self.longest_pause_s:
            raise ValueError(f"0 < shortest_pause_s={self.shortest_pause_s} <= longest_pause_s={self.longest_pause_s} must hold")


class Caution:
    """See the module."""

    def __init__(self, settings: CautionSettings) -> None:
        self._settings = settings
        self._surprises: collections.deque[bool] = collections.deque(maxlen=settings.window_steps)
        self._missed: collections.deque[tuple[bool, bool]] = collections.deque(maxlen=settings.window_requests)
        self._level = Level.OPEN
        self._until_s = 0.0
        self._pause_s = settings.shortest_pause_s
        self.num_changes = 0

    def level(self, now_s: float) -> Level:
        """The level now; one that has lasted long enough gives way to the next lower one."""
        if self._level is not Level.OPEN and now_s >= self._until_s:
            if self._level is Level.STOPPED:
                self._change(Level.IDLE_ONLY, now_s + self._settings.calm_s)
            else:
                self._pause_s = self._settings.shortest_pause_s
                self._change(Level.OPEN, now_s)
        return self._level

    def until_s(self) -> float | None:
        """When rollouts may run again; None: they may."""
        return self._until_s if self._level is Level.STOPPED else None

    def on_step(self, *, surprised: bool, now_s: float) -> None:
        """A rollout step has ended."""
        settings = self._settings
        self._surprises.append(surprised)
        if not surprised:
            return
        num_surprises = sum(self._surprises)
        if num_surprises >= settings.max_surprises:
            self._surprises.clear()
            self._stop(now_s)
        elif num_surprises >= settings.cautious_surprises:
            self._be_cautious(now_s)

    def on_end(self, *, missed: bool, blamed: bool, now_s: float) -> None:
        """An online request has ended."""
        settings = self._settings
        self._missed.append((missed, blamed))
        if not missed:
            return
        full = len(self._missed) == settings.window_requests
        if full and sum(missed for missed, _ in self._missed) > settings.max_missed_share * settings.window_requests:
            self._missed.clear()
            self._stop(now_s)
        elif blamed and sum(blamed for _, blamed in self._missed) >= settings.cautious_blamed:
            self._be_cautious(now_s)

    def _stop(self, now_s: float) -> None:
        self._change(Level.STOPPED, now_s + self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._settings.longest_pause_s)

    def _be_cautious(self, now_s: float) -> None:
        if self._level is not Level.STOPPED:
            self._change(Level.IDLE_ONLY, now_s + self._settings.calm_s)

    def _change(self, level: Level, until_s: float) -> None:
        self.num_changes += level is not self._level
        self._level, self._until_s = level, until_s
