"""Traces of online requests: when each arrived, how many tokens it read and wrote. CSV files, or slices that come with the package.

A trace is immutable; every change to it (a window, another time scale, other lengths) is asked for by name and stays visible in
`changes`, so that a figure can say what was replayed. Invariants: arrivals ascend from 0 or later, every length is at least 1.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.resources
import io
import math
from pathlib import Path

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
SESSION_COLUMN = "session_id"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One row. Requests with the same `session_id` belong to one conversation."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    session_id: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """See the module. `span_s` is how long it takes to replay: from 0 to the end of the window, or to the last arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    span_s: float
    changes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return ", ".join([self.name, *self.changes])

    def window(self, start_s: float, end_s: float) -> Trace:
        """What arrives in [start_s, end_s), which becomes [0, end_s - start_s)."""
        if not 0 <= start_s < end_s:
            raise ValueError(f"a window of {self.name} from {start_s} to {end_s} s is empty; give 0 <= start < end")
        kept = tuple(
            dataclasses.replace(request, arrival_s=request.arrival_s - start_s)
            for request in self.requests
            if start_s <= request.arrival_s < end_s
        )
        if not kept:
            raise ValueError(f"nothing of {self.name} arrives from {start_s:g} to {end_s:g} s; it lasts {self.span_s:.0f} s")
        changes = (*self.changes, f"{start_s:g}-{end_s:g} s")
        return dataclasses.replace(self, requests=kept, span_s=min(end_s, self.span_s) - start_s, changes=changes)

    def scaled(self, *, time: float = 1.0, prompts: float = 1.0, outputs: float = 1.0) -> Trace:
        """Arrivals `time` times as far apart, prompts and outputs `prompts` and `outputs` times as long (rounded up)."""
        named = {"time": time, "prompts": prompts, "outputs": outputs}
        for name, factor in named.items():
            if not 0 < factor < math.inf:
                raise ValueError(f"{name}={factor} scales {self.name}; it must be greater than 0")
        changes = (*self.changes, *(f"{name} x {factor:g}" for name, factor in named.items() if factor != 1.0))
        requests = tuple(
            dataclasses.replace(
                request,
                arrival_s=request.arrival_s * time,
                prompt_tokens=math.ceil(request.prompt_tokens * prompts),
                output_tokens=math.ceil(request.output_tokens * outputs),
            )
            for request in self.requests
        )
        return dataclasses.replace(self, requests=requests, span_s=self.span_s * time, changes=changes)

    @property
    def longest_context(self) -> int:
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)


def packaged_traces() -> list[str]:
    """Names of the traces that come with the package."""
    folder = importlib.resources.files("common.traffic.data")
    return sorted(entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv"))


def load_trace(name_or_path: str) -> Trace:
    """A trace of the package by its name, or a CSV file of the same form.

    Raises:
        ValueError: there is no such trace, or a row is wrong; the text names file, row and value.
    """
    if name_or_path in packaged_traces():
        resource = importlib.resources.files("common.traffic.data") / f"{name_or_path}.csv"
        return parse_trace(resource.read_text(), name=name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise ValueError(f"trace {name_or_path!r} is no file and none of {', '.join(packaged_traces())}")
    try:
        text = path.read_text()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no text in UTF-8 ({error}); a trace is a CSV file") from error
    return parse_trace(text, name=path.stem, source=str(path))


def parse_trace(text: str, *, name: str, source: str | None = None) -> Trace:
    """The requests of a CSV text with a header.

    Args:
        source: what errors call it.

    Raises:
        ValueError: names source, row (the header is row 1) and value.
    """
    source = source or name
    reader = csv.reader(io.StringIO(text))
    header = next(reader, [])
    if header not in ([*COLUMNS], [*COLUMNS, SESSION_COLUMN]):
        raise ValueError(f"{source} row 1: the header is {','.join(header)!r}; it must be {','.join(COLUMNS)}[,{SESSION_COLUMN}]")
    requests: list[TraceRequest] = []
    for fields in reader:
        where = f"{source} row {reader.line_num}"
        if len(fields) != len(header):
            raise ValueError(f"{where}: {len(fields)} fields, the header has {len(header)}")
        arrival_s = _arrival(fields[0], where)
        if requests and arrival_s < requests[-1].arrival_s:
            raise ValueError(f"{where}: arrival_s={fields[0]} is before the row above ({requests[-1].arrival_s:g}); sort the rows")
        requests.append(
            TraceRequest(
                arrival_s=arrival_s,
                prompt_tokens=_count(fields[1], where, "prompt_tokens"),
                output_tokens=_count(fields[2], where, "output_tokens"),
                session_id=fields[3] if len(fields) > len(COLUMNS) and fields[3] else None,
            )
        )
    if not requests:
        raise ValueError(f"{source}: there is no row below the header")
    return Trace(name=name, requests=tuple(requests), span_s=requests[-1].arrival_s)


def _arrival(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"{where}: arrival_s={text!r} must be a number of seconds, 0 or more")
    return value


def _count(text: str, where: str, column: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{where}: {column}={text!r} must be a whole number, 1 or more")
    return int(text)
