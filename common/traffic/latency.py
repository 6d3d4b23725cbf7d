"""What a client saw of its requests, and what of it met the objectives. Times are seconds on one clock.

TTFT counts from the trace's arrival time, not from when the load generator got round to sending. TPOT is the mean over the tokens
after the first. Invariant: a failed, refused or unfinished request has missed, whatever it got.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from common.serving.coserving.objectives import Objective


@dataclasses.dataclass(kw_only=True)
class RequestTimes:
    """One request as its client saw it. `token_s`: when each token came; `whole`: it got all it asked for."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    sent_s: float | None = None
    token_s: list[float] = dataclasses.field(default_factory=list)
    whole: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return self.token_s[0] - self.arrival_s if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """None for a request of fewer than two tokens."""
        if len(self.token_s) < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)

    @property
    def longest_gap_s(self) -> float:
        return max((after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)), default=0.0)

    def meets(self, objective: Objective, *, every_gap: bool = False) -> bool:
        """Whether TTFT and TPOT are within the objective; with `every_gap` also each gap between two tokens."""
        if not self.whole or self.ttft_s is None or self.ttft_s > objective.ttft_s:
            return False
        slowest_s = self.longest_gap_s if every_gap else self.tpot_s
        return slowest_s is None or slowest_s <= objective.tpot_s


ObjectiveOf = Callable[[RequestTimes], Objective]


def attainment(requests: Sequence[RequestTimes], objective_of: ObjectiveOf, *, every_gap: bool = False) -> float:
    """Share of requests that meet their objectives; 1 if there are none."""
    if not requests:
        return 1.0
    return sum(request.meets(objective_of(request), every_gap=every_gap) for request in requests) / len(requests)


def percentile_ms(values_s: Sequence[float | None], percent: float) -> float | None:
    """In milliseconds, of those that exist; None if none does."""
    known = [value_s for value_s in values_s if value_s is not None]
    return 1e3 * float(np.percentile(known, percent)) if known else None


def summary(requests: Sequence[RequestTimes]) -> dict[str, float | None]:
    """ttft_p50_ms, ttft_p99_ms, tpot_p50_ms, tpot_p99_ms, gap_p50_ms, gap_p99_ms and counts."""
    gaps = [after - before for request in requests for before, after in zip(request.token_s, request.token_s[1:], strict=False)]
    series: dict[str, Sequence[float | None]] = {
        "ttft": [request.ttft_s for request in requests],
        "tpot": [request.tpot_s for request in requests],
        "gap": gaps,
    }
    row: dict[str, float | None] = {
        f"{name}_p{percent}_ms": percentile_ms(values, percent) for name, values in series.items() for percent in (50, 99)
    }
    row["num_requests"] = len(requests)
    row["num_whole"] = sum(request.whole for request in requests)
    return row
