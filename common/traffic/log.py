"""TrafficLog: what online clients saw of one replica, request by request, and what its device did meanwhile, a JSON object a line.

Rows by "kind": start (trace, objectives), request (latencies, whether it met its objectives), device (sums that the front tells
under /metrics). `at_s` is wall time, so that stretches of a run that was resumed follow each other. Only appended to; a row that a
kill tore is nobody's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from common.clock import Clock, MonotonicClock
from common.metrics import append_line
from common.serving.coserving.objectives import Objective
from common.traffic.latency import RequestTimes
from common.traffic.trace import Trace

TRAFFIC = "traffic"
"""Folder of a workdir with a file for each replica."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSums:
    """What a co-serving front told at one moment. Sums start again at 0 when the replica does."""

    level: str | None
    level_s: dict[str, float]
    device_s: dict[str, float]
    num_done: dict[str, float]
    rollout_tokens: float


class TrafficLog:
    """See the module. Writes to `path`, whose folder it makes."""

    def __init__(self, path: Path, objective: Objective, *, clock: Clock | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._objective = path, objective
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a") as file:
                file.write("\n")  # behind a torn row
        self._wall_zero_s = time.time() - (clock or MonotonicClock()).now_s()

    def start(self, trace: Trace) -> None:
        fields = {
            "pid": os.getpid(),
            "trace": trace.description,
            "ttft_s": self._objective.ttft_s,
            "tpot_s": self._objective.tpot_s,
        }
        self._write("start", time.time(), fields)

    def request(self, times: RequestTimes) -> None:
        fields = {
            "prompt_tokens": times.prompt_tokens,
            "output_tokens": times.output_tokens,
            "whole": times.whole,
            "ttft_s": times.ttft_s,
            "tpot_s": times.tpot_s,
            "longest_gap_s": times.longest_gap_s,
            "late_s": None if times.sent_s is None else times.sent_s - times.arrival_s,
            "met": times.meets(self._objective),
            "met_every_gap": times.meets(self._objective, every_gap=True),
            "error": times.error,
        }
        self._write("request", self._wall_zero_s + times.arrival_s, fields)

    def device(self, sums: DeviceSums) -> None:
        self._write("device", time.time(), dataclasses.asdict(sums))

    def _write(self, kind: str, at_s: float, fields: Mapping[str, Any]) -> None:
        append_line(self._path, {"kind": kind, "at_s": at_s, **fields})


def read_traffic(path: Path) -> list[dict[str, Any]]:
    """All whole rows; a missing file has none."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def device_sums(metrics_text: str) -> DeviceSums | None:
    """From the Prometheus text of a co-serving front; None while its device has told nothing yet, or if it has one model only."""
    by_name: dict[str, dict[str, float]] = {}
    rollout_tokens = 0.0
    for family in text_string_to_metric_families(metrics_text):
        for sample in family.samples:
            if sample.name.startswith("rose_coserving_"):
                by_name.setdefault(sample.name.removeprefix("rose_coserving_"), {})["/".join(sample.labels.values())] = sample.value
            elif sample.name == "rose_tokens_total" and set(sample.labels.values()) == {"rollout", "completion"}:
                rollout_tokens = sample.value
    if "level_seconds_total" not in by_name:
        return None
    return DeviceSums(
        level=next((name for name, is_now in by_name["level"].items() if is_now), None),
        level_s=by_name["level_seconds_total"],
        device_s=by_name["device_seconds_total"],
        num_done=by_name["work_total"],
        rollout_tokens=rollout_tokens,
    )


def increase(sums: Iterable[float]) -> float:
    """By how much a sum grew from the first value to the last, what it had reached before it started again at 0 included."""
    total, before = 0.0, None
    for value in sums:
        if before is not None:
            total += value - before if value >= before else value
        before = value
    return total
