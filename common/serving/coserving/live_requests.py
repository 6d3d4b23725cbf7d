"""LiveRequests: online requests between arrival and end, when their next tokens are due, and what rollouts took from them.

Pure: times come in as arguments. It decides nothing; admission.py has the rules, docs/coserving.md the derivation of the schedule.
Invariant: `num_waiting` of them have no token yet, and only the others have a schedule.
"""

from __future__ import annotations

import dataclasses
import math

from common.serving.coserving.objectives import Objective


@dataclasses.dataclass(kw_only=True, slots=True)
class _Live:
    """`borrowed_s` is the time that rollouts had the device since the request arrived."""

    objective: Objective
    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_tokens: int = 0
    borrowed_s: float = 0.0
    borrowed_before_first_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Of a request that was answered in full. `blamed`: it missed an objective by no more than what rollouts took from it."""

    missed: bool
    blamed: bool


class LiveRequests:
    """See the module.

    Args:
        tpot_share: of the TPOT objective, at which tokens are scheduled.
        max_rise: a token waits for at most this many times the serving step that makes it.
    """

    def __init__(self, *, tpot_share: float, max_rise: float) -> None:
        self._tpot_share, self._max_rise = tpot_share, max_rise
        self._live: dict[str, _Live] = {}
        self._waiting: set[str] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Those that wait for their first token."""
        return len(self._waiting)

    def add(self, request_id: str, objective: Objective, arrival_s: float) -> None:
        self._live[request_id] = _Live(objective=objective, arrival_s=arrival_s)
        self._waiting.add(request_id)

    def on_tokens(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """A serving step gave it tokens; one that has ended is ignored."""
        live = self._live.get(request_id)
        if live is None:
            return
        if live.first_token_s is None:
            live.first_token_s, live.borrowed_before_first_s = now_s, live.borrowed_s
            self._waiting.discard(request_id)
        live.last_token_s = now_s
        live.num_tokens += num_tokens

    def lend(self, duration_s: float) -> None:
        """Rollouts had the device for so long."""
        for live in self._live.values():
            live.borrowed_s += duration_s

    def end(self, request_id: str, *, whole: bool) -> Outcome | None:
        """Forget it. None: it was not answered in full, which says nothing about speed."""
        live = self._live.pop(request_id, None)
        self._waiting.discard(request_id)
        if live is None or live.first_token_s is None or not whole:
            return None
        late_s = live.first_token_s - live.arrival_s - live.objective.ttft_s
        slow_s = live.last_token_s - live.first_token_s - live.objective.tpot_s * (live.num_tokens - 1)
        since_first_s = live.borrowed_s - live.borrowed_before_first_s
        blamed = 0 < late_s <= live.borrowed_before_first_s or 0 < slow_s <= since_first_s
        return Outcome(missed=late_s > 0 or slow_s > 0, blamed=blamed)

    def tightest(self, serving_s: float, longest_s: float) -> tuple[str | None, float]:
        """The request whose next token is due first, and when; all must have their first token.

        Args:
            serving_s: what the serving step at hand takes.
            longest_s: what the longest one that serving's limits allow takes.
        """
        reserve_s = max(0.0, longest_s - serving_s)
        share, most_s = self._tpot_share, self._max_rise * serving_s
        tightest, first_due_s = None, math.inf
        for request_id, live in self._live.items():
            tpot_s, count = live.objective.tpot_s, live.num_tokens
            assert live.first_token_s is not None
            due_s = min(
                live.last_token_s + min(share * tpot_s, most_s),
                live.first_token_s + min(share * tpot_s * count, tpot_s * count - reserve_s),
            )
            if due_s < first_due_s:
                tightest, first_due_s = request_id, due_s
        return tightest, first_due_s
