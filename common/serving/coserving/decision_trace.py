"""What was decided and why: a log that replays, a timeline that Perfetto opens, and sums for metrics.

DecisionTrace listens to a device. It keeps the newest events and decisions, and nothing of them ever changes a decision. Invariant:
events_from_lines(log.lines()) fed to an equal policy at their times gives the same decisions, provided the log was never full.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from common.serving.coserving.events import (
    AdmissionPolicy,
    Arrived,
    Decision,
    Ended,
    Event,
    Free,
    Planned,
    Record,
    Side,
    StepDone,
    Work,
    WorkDone,
)
from common.serving.coserving.step_time import StepFeatures

EVENTS: dict[str, type] = {kind.__name__: kind for kind in (Arrived, Ended, Free, Planned, StepDone, WorkDone)}
TRACKS = {Side.SERVING.value: 1, Side.ROLLOUT.value: 2, Work.SLICE.value: 3, Work.PARK.value: 4, Work.ACTIVATE.value: 4}
TRACK_NAMES = {1: "serving steps", 2: "rollout steps", 3: "commit of rollout weights", 4: "park and activate"}
MAX_ENTRIES = 200_000
"""Seven minutes of a device that is never idle, at steps of 6 ms; some 170 MB. Older ones are dropped."""

Entry = tuple[float, Event, tuple[Decision, ...]]


class DecisionTrace:
    """See the module. Pass `listen` as a device's `on_event`."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: collections.deque[Entry] = collections.deque(maxlen=max_entries)
        self.counts: collections.Counter[str] = collections.Counter()
        """Decisions by kind and reason."""

    def listen(self, event: Event, now_s: float, decisions: tuple[Decision, ...]) -> None:
        self._entries.append((now_s, event, decisions))
        for decision in decisions:
            self.counts[f"{type(decision).__name__.lower()}: {decision.record.reason}"] += 1

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def lines(self) -> Iterator[str]:
        """The log: one JSON object a line."""
        for now_s, event, _ in self._entries:
            yield json.dumps({"now_s": now_s, "event": type(event).__name__, **dataclasses.asdict(event)})

    def write_chrome_trace(self, path: Path) -> None:
        """Chrome's trace format, which Perfetto opens: each piece of work on a track, with the record it was decided on."""
        path.write_text(json.dumps({"traceEvents": list(self.chrome_events()), "displayTimeUnit": "ms"}))

    def chrome_events(self, since_s: float = -math.inf) -> Iterator[dict[str, Any]]:
        """`traceEvents` of what was done from a moment on."""
        yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "device"}}
        for track, name in TRACK_NAMES.items():
            yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        record: Record | None = None
        for now_s, event, decisions in self._since(since_s):
            if decisions:
                record = decisions[0].record
                yield _counter(now_s, "live requests", {"live": record.num_live, "without a token": record.num_waiting})
                yield _counter(now_s, "caution", {"level": int(record.level)})
                if record.slack_s is not None:
                    yield _counter(now_s, "slack", {"ms": 1e3 * record.slack_s})
            elif isinstance(event, StepDone):
                arguments = {"tokens": event.features.num_tokens, **dataclasses.asdict(event.features), **_why(record)}
                yield _span(now_s, event.duration_s, event.side.value, arguments)
            elif isinstance(event, WorkDone):
                yield _span(now_s, event.duration_s, event.kind.value, _why(record))

    def _since(self, since_s: float) -> list[Entry]:
        newest = itertools.takewhile(lambda entry: entry[0] >= since_s, reversed(self._entries))
        return list(newest)[::-1]


def events_from_lines(lines: Iterable[str]) -> Iterator[tuple[float, Event]]:
    """A log read back."""
    for line in lines:
        fields = json.loads(line)
        now_s, kind = fields.pop("now_s"), EVENTS[fields.pop("event")]
        for name in ("serving", "features"):
            if isinstance(fields.get(name), dict):
                fields[name] = StepFeatures(**fields[name])
        if kind is StepDone:
            fields["side"] = Side(fields["side"])
            fields["tokens"] = tuple((request_id, count) for request_id, count in fields["tokens"])
        elif kind is WorkDone:
            fields["kind"] = Work(fields["kind"])
        yield now_s, kind(**fields)


def replay(policy: AdmissionPolicy, events: Iterable[tuple[float, Event]]) -> list[tuple[Decision, ...]]:
    """What a policy decides on a log, event by event."""
    return [policy.on_event(event, now_s) for now_s, event in events]


def _why(record: Record | None) -> dict[str, Any]:
    if record is None:
        return {}
    fields = dataclasses.asdict(record)
    fields["level"] = record.level.name
    return {"why": fields.pop("reason"), **{name: value for name, value in fields.items() if value is not None}}


def _span(end_s: float, duration_s: float, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    start_us = 1e6 * (end_s - duration_s)
    return {"ph": "X", "pid": 1, "tid": TRACKS[name], "name": name, "ts": start_us, "dur": 1e6 * duration_s, "args": arguments}


def _counter(now_s: float, name: str, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "pid": 1, "name": name, "ts": 1e6 * now_s, "args": values}
