"""What a co-serving benchmark makes of its measurements: objectives, rows, pooled results with bootstrap intervals, a table.

A row keeps the latencies of its requests, so that everything is computed from what was measured, also after a resume, and against
the objectives of all repeats of serving alone. Intervals resample requests, which are paired between variants by repeat and place
in the trace, and bins of time for rollout tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.serving.coserving.objectives import LengthClasses, Objective
from common.traffic.latency import RequestTimes

PAPER = (1.6, 1.27)
"""TTFT and TPOT objective over the p99 of serving alone: 500 / 315 ms and 150 / 118 ms in the paper's table."""
FACTORS = (PAPER, (2.0, 2.0), (1.25, 1.25))
UNLOADED_FACTOR = 10.0
"""A TTFT objective is at most so many times the unloaded median of its prompt-length quartile."""
BIN_S = 5.0
NUM_RESAMPLES = 2000

Row = dict[str, Any]


def latencies(requests: Sequence[RequestTimes]) -> list[list[float | int | bool | None]]:
    """[prompt tokens, whole, TTFT s, mean TPOT s, longest gap s] of each."""
    return [[request.prompt_tokens, request.whole, request.ttft_s, request.tpot_s, request.longest_gap_s] for request in requests]


def quartiles(prompt_tokens: Sequence[int]) -> LengthClasses:
    return LengthClasses(bounds=tuple(sorted({int(value) for value in np.percentile(prompt_tokens, [25, 50, 75])})))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What objectives are made from. `unloaded_s`: median TTFT of each class on an idle server."""

    classes: LengthClasses
    unloaded_s: dict[str, float]

    def objectives(self, alone: Sequence[Row], factors: tuple[float, float] = PAPER) -> dict[str, Objective]:
        ttft_s = percentile([entry[2] for row in alone for entry in row["requests"]], 99)
        tpot_s = percentile([entry[3] for row in alone for entry in row["requests"]], 99)
        return {
            name: Objective(ttft_s=min(factors[0] * ttft_s, UNLOADED_FACTOR * unloaded_s), tpot_s=factors[1] * tpot_s)
            for name, unloaded_s in self.unloaded_s.items()
        }

    def met(self, row: Row, objectives: dict[str, Objective], *, every_gap: bool = False) -> np.ndarray:
        """Whether each request of a row met its objectives."""
        found = []
        for prompt_tokens, whole, ttft_s, tpot_s, gap_s in row["requests"]:
            objective = objectives[self.classes.class_of(prompt_tokens)]
            slow_s = gap_s if every_gap else tpot_s
            found.append(
                bool(whole) and ttft_s is not None and ttft_s <= objective.ttft_s and (slow_s is None or slow_s <= objective.tpot_s)
            )
        return np.array(found, bool)


def percentile(values: Sequence[float | None], percent: float) -> float:
    known = [value for value in values if value is not None]
    if not known:
        raise ValueError("nothing was answered, so there are no latencies to make objectives from; widen --window")
    return float(np.percentile(known, percent))


def complete(row: Row, measured: Measured, alone: Sequence[Row], best_alone: float | None) -> Row:
    """The row's columns, from what was measured of it, of serving alone and of rollouts alone (tokens/s)."""
    columns = dict(row)
    busy = float(np.mean([other["serving_share"] for other in alone]))
    columns["busy_share_alone"] = busy
    if row["requests"]:
        objectives = measured.objectives(alone)
        for name, index in (("ttft", 2), ("tpot", 3)):
            values = [entry[index] for entry in row["requests"]]
            for percent in (50, 99):
                columns[f"{name}_p{percent}_ms"] = 1e3 * percentile(values, percent)
        columns["attainment"] = float(measured.met(row, objectives).mean())
        columns["attainment_every_gap"] = float(measured.met(row, objectives, every_gap=True).mean())
        for factors in FACTORS[1:]:
            columns[f"attainment_{factors[0]:g}x"] = float(measured.met(row, measured.objectives(alone, factors)).mean())
    if best_alone is not None and row["variant"] != "serving_alone":
        columns["harvest"] = row["rollout_tokens_per_s"] / (best_alone * (1 - busy))
    return columns


def bootstrap(values: np.ndarray, *, seed: int = 0) -> tuple[float, float, float]:
    """Mean and 95 % interval of a series of paired differences."""
    rng = np.random.default_rng(seed)
    means = values[rng.integers(0, len(values), (NUM_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def compare(rows: Sequence[Row], measured: Measured, best_alone: float | None) -> list[Row]:
    """Pooled results of each variant, with differences to serving alone (attainment) and to idle_only (harvest)."""
    by_variant: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["requests"]:
            by_variant.setdefault(row["variant"], {})[row["repeat"]] = row
    alone = list(by_variant["serving_alone"].values())
    busy = float(np.mean([row["serving_share"] for row in alone]))
    objectives = measured.objectives(alone)
    results = []
    for variant, repeats in by_variant.items():
        pooled = [entry for row in repeats.values() for entry in row["requests"]]
        result: Row = {"variant": variant, "num_requests": len(pooled), "repeats": len(repeats)}
        for name, index in (("ttft", 2), ("tpot", 3)):
            for percent in (50, 99):
                result[f"{name}_p{percent}_ms"] = 1e3 * percentile([entry[index] for entry in pooled], percent)
        for every_gap, column in ((False, "attainment"), (True, "attainment_every_gap")):
            met = [measured.met(row, objectives, every_gap=every_gap) for row in repeats.values()]
            result[column] = float(np.concatenate(met).mean())
        shared = [repeat for repeat in repeats if repeat in by_variant["serving_alone"]]
        result["attainment_minus_alone"] = _attainment_difference(measured, objectives, by_variant, variant, shared)
        if best_alone is not None and variant != "serving_alone":
            scale = 1 / (best_alone * (1 - busy))
            result["harvest"] = scale * float(np.mean([row["rollout_tokens_per_s"] for row in repeats.values()]))
            if variant != "idle_only" and "idle_only" in by_variant:
                result["harvest_minus_idle_only"] = _harvest_difference(by_variant, variant, scale)
        results.append(result)
    return results


def _attainment_difference(
    measured: Measured,
    objectives: dict[str, Objective],
    by_variant: dict[str, dict[int, Row]],
    variant: str,
    repeats: Sequence[int],
) -> tuple[float, float, float] | None:
    differences = []
    for repeat in repeats:
        theirs, alone = (measured.met(by_variant[name][repeat], objectives) for name in (variant, "serving_alone"))
        count = min(len(theirs), len(alone))
        differences.append(theirs[:count].astype(float) - alone[:count].astype(float))
    return bootstrap(np.concatenate(differences)) if differences else None


def _harvest_difference(by_variant: dict[str, dict[int, Row]], variant: str, scale: float) -> tuple[float, float, float] | None:
    differences = []
    for repeat, row in by_variant[variant].items():
        other = by_variant["idle_only"].get(repeat)
        if other is not None:
            bins = zip(row["rollout_tokens_by_bin"], other["rollout_tokens_by_bin"], strict=False)
            differences += [scale * (mine - theirs) / BIN_S for mine, theirs in bins]
    return bootstrap(np.array(differences)) if differences else None


def table(results: Sequence[Row]) -> str:
    lines = [
        f"{'variant':<14}{'requests':>9}{'TTFT p50/p99 ms':>18}{'TPOT p50/p99 ms':>18}{'met':>8}{'every gap':>10}"
        f"{'- alone, points':>24}{'harvest':>9}{'- idle_only':>24}"
    ]
    for row in results:
        ttft = f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}"
        tpot = f"{row['tpot_p50_ms']:.1f} / {row['tpot_p99_ms']:.1f}"
        line = f"{row['variant']:<14}{row['num_requests']:>9}{ttft:>18}{tpot:>18}{row['attainment']:>8.2%}"
        line += f"{row['attainment_every_gap']:>10.2%}{_interval(row['attainment_minus_alone'], 100):>24}"
        line += f"{row['harvest']:>9.2f}" if "harvest" in row else f"{'-':>9}"
        lines.append(line + f"{_interval(row.get('harvest_minus_idle_only'), 1):>24}")
    return "\n".join(lines)


def _interval(value: tuple[float, float, float] | None, scale: float) -> str:
    if value is None:
        return "-"
    mean, low, high = (scale * part for part in value)
    return f"{mean:+.2f} ({low:+.2f} .. {high:+.2f})"
