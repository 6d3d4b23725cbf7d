"""What a run's co-serving replicas served online, which objectives were met, and how much of the rollout was borrowed from them.

Latencies are those that clients saw over HTTP from the trace's arrival times, in every phase of the run; a failed or unfinished
request has missed. A request counts as beside rollouts if rollouts had the device while it was looked at between the polls around
its arrival. Borrowed tokens are those that a co-serving replica sampled for training; rates are over the seconds in which the run
collected rollouts. Made from workdir/traffic/REPLICA.jsonl and metrics.jsonl alone, so it can be made again.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from common.metrics import TOKENS_PREFIX, RunLog, Scalar
from common.traffic.latency import percentile_ms
from common.traffic.log import TRAFFIC, increase, read_traffic

Rows = Sequence[Mapping[str, Any]]
LEVEL_HEIGHTS = {"open": 0, "idle_only": 1, "stopped": 2}
NUM_ERRORS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoServed:
    """One co-serving replica of a run: what is stated of it (`row`, plain values), and what that was made of."""

    row: dict[str, Any]
    traffic: Rows

    def lines(self) -> list[str]:
        """What the terminal shows at the end."""
        row = self.row
        latencies = ", ".join(
            f"{name.upper()} p50/p99 {_ms(row[f'{name}_p50_ms'])}/{_ms(row[f'{name}_p99_ms'])} ms" for name in ("ttft", "tpot")
        )
        objectives = f"objectives ({row['ttft_objective_ms']:g} and {row['tpot_objective_ms']:g} ms)"
        beside = f"{_percent(row['attainment_beside_rollouts'])} of {row['num_beside_rollouts']} beside rollouts"
        rates = f"{row['rollout_tokens_per_s']:.0f} of {row['all_rollout_tokens_per_s']:.0f} tokens/s"
        return [
            f"Online on {row['replica']}: {row['num_requests']} requests, {row['num_failed']} failed, {latencies}",
            f"  {_percent(row['attainment'])} met their {objectives}, {beside}",
            f"  {_percent(row['rollout_share'])} of the rollout's tokens were borrowed there: {rates}",
        ]


def read_coserving(log: RunLog, workdir: Path) -> list[CoServed]:
    """Of every replica that online traffic was sent to, in order of their names."""
    found = []
    for path in sorted((workdir / TRAFFIC).glob("*.jsonl")):
        traffic = read_traffic(path)
        if any(row["kind"] == "request" for row in traffic):
            found.append(CoServed(row=coserving_row(path.stem, traffic, log.rows), traffic=traffic))
    return found


def coserving_row(replica: str, traffic: Rows, log_rows: Sequence[Mapping[str, Scalar]]) -> dict[str, Any]:
    """All figures of one replica; shares are fractions.

    Args:
        traffic: rows of TrafficLog, at least one request among them.
        log_rows: of the run's metrics.jsonl.
    """
    starts, requests, device = (_of_kind(traffic, kind) for kind in ("start", "request", "device"))
    newest = starts[-1]
    return {
        "replica": replica,
        "trace": newest["trace"],
        "ttft_objective_ms": 1e3 * newest["ttft_s"],
        "tpot_objective_ms": 1e3 * newest["tpot_s"],
        **_latencies(requests),
        **_beside_rollouts(requests, device),
        **_device(device),
        **_borrowed(replica, log_rows),
    }


def _latencies(requests: Rows) -> dict[str, Any]:
    errors = sorted({str(row["error"]) for row in requests if row["error"] is not None})
    late = [row["late_s"] for row in requests if row["late_s"] is not None]
    figures: dict[str, Any] = {
        "num_requests": len(requests),
        "num_failed": sum(not row["whole"] for row in requests),
        "errors": errors[:NUM_ERRORS],
        "output_tokens": sum(row["output_tokens"] for row in requests if row["whole"]),
        "attainment": _share(requests, "met"),
        "attainment_every_gap": _share(requests, "met_every_gap"),
        "latest_send_ms": 1e3 * max(late, default=0.0),
    }
    for name in ("ttft", "tpot"):
        for percent in (50, 99):
            figures[f"{name}_p{percent}_ms"] = percentile_ms([row[f"{name}_s"] for row in requests], percent)
    return figures


def _beside_rollouts(requests: Rows, device: Rows) -> dict[str, Any]:
    """The same for requests that arrived while rollouts had steps, and for the others."""
    ends_s = [row["at_s"] for row in device]
    busy = [after["device_s"]["rollout"] != before["device_s"]["rollout"] for before, after in itertools.pairwise(device)]
    beside: list[Mapping[str, Any]] = []
    others: list[Mapping[str, Any]] = []
    for row in requests:
        idx = bisect.bisect_right(ends_s, row["at_s"]) - 1
        (beside if 0 <= idx < len(busy) and busy[idx] else others).append(row)
    figures: dict[str, Any] = {"num_beside_rollouts": len(beside), "attainment_beside_rollouts": _share(beside, "met")}
    figures["attainment_without_rollouts"] = _share(others, "met")
    for name in ("ttft", "tpot"):
        for what, rows in (("beside", beside), ("without", others)):
            figures[f"{name}_p99_ms_{what}_rollouts"] = percentile_ms([row[f"{name}_s"] for row in rows], 99)
    return figures


def _device(device: Rows) -> dict[str, Any]:
    """Seconds of the device while it was polled, and how much it did."""

    def grown(name: str) -> dict[str, float]:
        return {key: increase(row[name].get(key, 0.0) for row in device) for key in (device[-1][name] if device else ())}

    level_s, done = grown("level_s"), {key: round(value) for key, value in grown("num_done").items()}
    return {
        "level_s": level_s,
        "device_s": grown("device_s"),
        "observed_s": sum(level_s.values()),
        "num_parked": done.get("park", 0),
        "num_activated": done.get("activate", 0),
        "num_commit_slices": done.get("slice", 0),
        "num_rollout_steps": done.get("rollout", 0),
        "num_serving_steps": done.get("serving", 0),
    }


def _borrowed(replica: str, log_rows: Sequence[Mapping[str, Scalar]]) -> dict[str, Any]:
    """Tokens that rollouts for training got from this replica, of those from all."""
    rows = [row for row in log_rows if row["phase"] == "train"]
    here = sum(float(row.get(f"{TOKENS_PREFIX}{replica}", 0)) for row in rows)
    everywhere = sum(float(value) for row in rows for name, value in row.items() if name.startswith(TOKENS_PREFIX))
    seconds = sum(float(row["rollout_s"]) for row in rows)
    return {
        "rollout_tokens": round(here),
        "all_rollout_tokens": round(everywhere),
        "rollout_share": here / everywhere if everywhere else None,
        "rollout_s": seconds,
        "rollout_tokens_per_s": here / seconds if seconds else 0.0,
        "all_rollout_tokens_per_s": everywhere / seconds if seconds else 0.0,
    }


def coserving_markdown(each: CoServed, picture: str) -> list[str]:
    """The section of one replica in report.md."""
    row = each.row
    lines = [
        f"## Online traffic on {row['replica']}, and what rollouts borrowed",
        "",
        f"Replayed over and over: {row['trace']}. {row['num_requests']} requests with {row['output_tokens']} tokens were sent, "
        f"{row['num_failed']} failed or were unfinished. {_percent(row['attainment'])} met both objectives "
        f"({_percent(row['attainment_every_gap'])} in every gap between two tokens). The load generator was late by at most "
        f"{row['latest_send_ms']:.0f} ms.",
        "",
        *(f"- `{error}`" for error in row["errors"]),
        *([""] if row["errors"] else []),
        "| | objective | p50 | p99 | p99 beside rollouts | p99 without |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, title in (("ttft", "time to first token"), ("tpot", "time per output token")):
        cells = [row[f"{name}_{key}"] for key in ("p50_ms", "p99_ms", "p99_ms_beside_rollouts", "p99_ms_without_rollouts")]
        lines.append(f"| {title}, ms | {row[f'{name}_objective_ms']:g} | {' | '.join(map(_ms, cells))} |")
    lines += [
        f"| objectives met | | {_percent(row['attainment'])} | | {_percent(row['attainment_beside_rollouts'])} of "
        f"{row['num_beside_rollouts']} | {_percent(row['attainment_without_rollouts'])} |",
        "",
        f"Borrowed: {row['rollout_tokens']} of {row['all_rollout_tokens']} rollout tokens, {_percent(row['rollout_share'])}; "
        f"{row['rollout_tokens_per_s']:.0f} of {row['all_rollout_tokens_per_s']:.0f} tokens/s while rollouts were collected "
        f"({row['rollout_s']:.0f} s).",
        "",
        f"The policy was parked {row['num_parked']} times and activated {row['num_activated']} times; its weights came in "
        f"{row['num_commit_slices']} slices of commits.",
        "",
        *_shares_table("device", row["device_s"], row["observed_s"], rest="idle"),
        *_shares_table("level of caution", row["level_s"], row["observed_s"]),
        f"![online traffic]({picture})",
        "",
    ]
    return lines


def _shares_table(title: str, seconds: Mapping[str, float], total_s: float, *, rest: str | None = None) -> list[str]:
    if not total_s:
        return []
    parts = dict(seconds)
    if rest is not None:
        parts[rest] = max(0.0, total_s - sum(seconds.values()))
    rows = [f"| {name} | {value:.1f} | {value / total_s:.1%} |" for name, value in parts.items()]
    return [f"| {title} | seconds | share |", "|---|--:|--:|", *rows, ""]


def plot_coserving(each: CoServed, path: Path) -> None:
    """TTFT and TPOT of every request at its arrival with the objectives' lines; rollout tokens/s and caution below."""
    requests, device = _of_kind(each.traffic, "request"), _of_kind(each.traffic, "device")
    zero_s = min(row["at_s"] for row in each.traffic)
    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(3, 3, 2, 1))
    for axis, name in zip(axes, ("ttft", "tpot"), strict=False):
        for met, color, label in ((True, "C0", "met its objectives"), (False, "C3", "missed one")):
            points = [(row["at_s"] - zero_s, 1e3 * row[f"{name}_s"]) for row in requests if row["met"] is met and row[f"{name}_s"]]
            if points:
                axis.plot(*zip(*points, strict=True), ".", markersize=3, color=color, label=label)
        axis.axhline(each.row[f"{name}_objective_ms"], color="black", linewidth=0.8, linestyle="--", label="objective")
        axis.set(ylabel=f"{name.upper()} ms", yscale="log")
        axis.legend(fontsize=8, loc="upper right")
    times = [row["at_s"] - zero_s for row in device]
    rates = [_rate(before, after) for before, after in itertools.pairwise(device)]
    if rates:
        axes[2].step(times[1:], rates, where="pre", color="C2")
        axes[3].step(times, [LEVEL_HEIGHTS.get(row["level"], 0) for row in device], where="post", color="C1")
    axes[2].set(ylabel="rollout tokens/s")
    axes[3].set(xlabel="seconds since the traffic began", ylim=(-0.2, 2.2))
    axes[3].set_yticks(list(LEVEL_HEIGHTS.values()), list(LEVEL_HEIGHTS))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(visible=True, alpha=0.25)
    figure.savefig(path, dpi=110)


def write_coserving(found: Sequence[CoServed], workdir: Path) -> list[str]:
    """Write coserving.json and a picture for each replica into the workdir; returns the sections of report.md."""
    lines: list[str] = []
    for each in found:
        picture = f"{TRAFFIC}/{each.row['replica']}.png"
        plot_coserving(each, workdir / picture)
        lines += coserving_markdown(each, picture)
    if found:
        (workdir / "coserving.json").write_text(json.dumps({"rows": [each.row for each in found]}, indent=1) + "\n")
    return lines


def _rate(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    seconds = after["at_s"] - before["at_s"]
    return increase([before["rollout_tokens"], after["rollout_tokens"]]) / seconds if seconds > 0 else 0.0


def _of_kind(rows: Rows, kind: str) -> list[Mapping[str, Any]]:
    return sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["at_s"])


def _share(rows: Rows, name: str) -> float | None:
    return sum(bool(row[name]) for row in rows) / len(rows) if rows else None


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
