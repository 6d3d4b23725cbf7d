"""Replay traces of online traffic against OpenAI-compatible servers, and say which latency objectives were met.

    python -m scripts.replay_trace --url=http://127.0.0.1:8000 --trace=azure2023_conv_pub --time=2 --prompts=0.1 --window=0,60

Open loop: each request is sent when the trace says. Several --trace run together, as services of one cluster, each against its
--url (one --url serves all). Shows a bar, a table and, with --out=F.json, JSON rows and a plot beside it: TTFT, TPOT and gaps
over time with the line of the objective, and below them the rollout tokens/s that the server reports under /metrics, if it does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from common.clock import MonotonicClock
from common.errors import RoseError
from common.progress import ProgressBar, progress_bar
from common.serving.coserving.objectives import Objective
from common.traffic.latency import RequestTimes, attainment, summary
from common.traffic.openai_stream import Target, get, served_model
from common.traffic.replay import LEAD_S, ReplayOptions, replay
from common.traffic.trace import Trace, load_trace, packaged_traces
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_URL = flags.DEFINE_multi_string("url", [], "Server, http(s)://HOST:PORT; one, or one a trace.", flag_values=_FLAGS)
_TRACE = flags.DEFINE_multi_string(
    "trace", ["azure2023_conv_pub"], f"{', '.join(packaged_traces())}, or a CSV file of that form.", flag_values=_FLAGS
)
_MODEL = flags.DEFINE_string("model", None, "Name of the model; default: the first that the server names.", flag_values=_FLAGS)
_KEY = flags.DEFINE_string("api_key_file", None, "File with the API key.", flag_values=_FLAGS)
_WINDOW = flags.DEFINE_list("window", None, "START,END in seconds of the trace as it is stored; default: all.", flag_values=_FLAGS)
_TIME = flags.DEFINE_float("time", 1.0, "Stretch the time between arrivals by this.", flag_values=_FLAGS)
_PROMPTS = flags.DEFINE_float("prompts", 1.0, "Scale the lengths of prompts by this.", flag_values=_FLAGS)
_OUTPUTS = flags.DEFINE_float("outputs", 1.0, "Scale the lengths of outputs by this.", flag_values=_FLAGS)
_TTFT_MS = flags.DEFINE_float("ttft_ms", 500.0, "Objective for the time to the first token.", flag_values=_FLAGS)
_TPOT_MS = flags.DEFINE_float("tpot_ms", 150.0, "Objective for the mean time of each token after it.", flag_values=_FLAGS)
_VOCAB = flags.DEFINE_integer("vocab_size", 64, "Prompts are random token ids below this.", lower_bound=2, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of prompts and draws.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file for rows and requests; the plot goes beside it as .png.", flag_values=_FLAGS)

POLL_S = 1.0
"""Between two looks at the server's rollout tokens."""
ROLLOUT_COUNTER = re.compile(rb'^rose_tokens_total\{interface="rollout",kind="completion"\} ([0-9.e+]+)$', re.MULTILINE)

RolloutSeries = list[tuple[float, float]]
"""(seconds since the trace's zero, rollout tokens generated so far)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """One trace against one server."""

    trace: Trace
    target: Target
    requests: list[RequestTimes]
    zero_s: float
    rollout_tokens: RolloutSeries


def traces_of_flags() -> list[Trace]:
    traces = []
    for name in _TRACE.value:
        trace = load_trace(name)
        if _WINDOW.value is not None:
            try:
                start_s, end_s = map(float, _WINDOW.value)
            except ValueError as error:
                raise ValueError(f"--window={','.join(_WINDOW.value)} must be START,END in seconds") from error
            trace = trace.window(start_s, end_s)
        traces.append(trace.scaled(time=_TIME.value, prompts=_PROMPTS.value, outputs=_OUTPUTS.value))
    return traces


async def replay_all(traces: Sequence[Trace], targets: Sequence[Target], bar: ProgressBar) -> list[Replayed]:
    """Replay all traces from one zero."""
    clock = MonotonicClock()
    zero_s = clock.now_s() + LEAD_S
    series: list[RolloutSeries] = [[] for _ in targets]
    polls = [asyncio.create_task(poll_rollouts(target, zero_s, into)) for target, into in zip(targets, series, strict=True)]
    options = ReplayOptions(vocab_size=_VOCAB.value, seed=_SEED.value)
    done = await asyncio.gather(
        *(
            replay(trace, target, options, on_done=bar.count, clock=clock, start_s=zero_s)
            for trace, target in zip(traces, targets, strict=True)
        )
    )
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    return [
        Replayed(trace=trace, target=target, requests=requests, zero_s=zero_s, rollout_tokens=into)
        for trace, target, requests, into in zip(traces, targets, done, series, strict=True)
    ]


async def poll_rollouts(target: Target, zero_s: float, into: RolloutSeries) -> None:
    """Note the server's count of rollout tokens every POLL_S, while it reports one."""
    clock = MonotonicClock()
    while True:
        try:
            found = ROLLOUT_COUNTER.search(await get(target.url, "/metrics", target.api_key))
        except (RoseError, OSError, ValueError, asyncio.IncompleteReadError):
            return  # a server without such figures: the plot does without
        if found is not None:
            into.append((clock.now_s() - zero_s, float(found.group(1))))
        await asyncio.sleep(POLL_S)


def row_of(replayed: Replayed, objective: Objective) -> dict[str, Any]:
    """Latencies in ms, attainments as fractions, lateness of the generator in ms."""
    requests = replayed.requests
    sent = [request.sent_s - request.arrival_s for request in requests if request.sent_s is not None]
    errors = sorted({request.error for request in requests if request.error is not None})
    counted = replayed.rollout_tokens
    rate = None
    if len(counted) > 1:
        rate = (counted[-1][1] - counted[0][1]) / (counted[-1][0] - counted[0][0])
    return {
        "trace": replayed.trace.description,
        "url": replayed.target.url,
        **summary(requests),
        "attainment": attainment(requests, lambda _: objective),
        "attainment_every_gap": attainment(requests, lambda _: objective, every_gap=True),
        "ttft_objective_ms": 1e3 * objective.ttft_s,
        "tpot_objective_ms": 1e3 * objective.tpot_s,
        "rollout_tokens_per_s": rate,
        "latest_send_ms": 1e3 * max(sent, default=0.0),
        "errors": errors[:5],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    columns = (
        ("requests", "num_requests", "d"),
        ("whole", "num_whole", "d"),
        ("TTFT p50", "ttft_p50_ms", ".1f"),
        ("p99 ms", "ttft_p99_ms", ".1f"),
        ("TPOT p50", "tpot_p50_ms", ".1f"),
        ("p99 ms", "tpot_p99_ms", ".1f"),
        ("gap p99 ms", "gap_p99_ms", ".1f"),
        ("met", "attainment", ".2%"),
        ("every gap", "attainment_every_gap", ".2%"),
        ("rollout tok/s", "rollout_tokens_per_s", ".0f"),
    )
    width = max(len(row["trace"]) for row in rows)
    lines = [f"{'trace':<{width}}" + "".join(f"{title:>14}" for title, _, _ in columns)]
    for row in rows:
        cells = ["-" if row[key] is None else format(row[key], form) for _, key, form in columns]
        lines.append(f"{row['trace']:<{width}}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def plot(all_replayed: Sequence[Replayed], objective: Objective, path: Path) -> None:
    """TTFT, TPOT and longest gap of each request at its arrival, the objectives' lines, rollout tokens/s below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(4, 1, figsize=(11, 10), sharex=True, constrained_layout=True)
    for replayed in all_replayed:
        arrivals = [request.arrival_s - replayed.zero_s for request in replayed.requests]
        latencies: tuple[list[float | None], ...] = (
            [request.ttft_s for request in replayed.requests],
            [request.tpot_s for request in replayed.requests],
            [request.longest_gap_s for request in replayed.requests],
        )
        for axis, values in zip(axes[:3], latencies, strict=True):
            points = [(x, 1e3 * y) for x, y in zip(arrivals, values, strict=True) if y]
            axis.plot(*zip(*points, strict=True), ".", markersize=3, label=replayed.trace.name) if points else None
        counts = replayed.rollout_tokens
        if len(counts) > 1:
            rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(counts)]
            axes[3].step([count[0] for count in counts[1:]], rates, where="pre", label=replayed.trace.name)
    for axis, name, limit_s in zip(
        axes, ("TTFT ms", "TPOT ms", "longest gap ms"), (objective.ttft_s, objective.tpot_s, objective.tpot_s), strict=False
    ):
        axis.axhline(1e3 * limit_s, color="black", linewidth=0.8, linestyle="--", label="objective")
        axis.set(ylabel=name, yscale="log")
        axis.legend(fontsize=8, loc="upper right")
    axes[3].set(ylabel="rollout tokens/s", xlabel="seconds since the trace's zero")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    objective = Objective(ttft_s=_TTFT_MS.value / 1e3, tpot_s=_TPOT_MS.value / 1e3)
    traces = traces_of_flags()
    if len(_URL.value) not in (1, len(traces)):
        raise ValueError(f"{len(_URL.value)} --url for {len(traces)} --trace; give one for all, or one each")
    urls = _URL.value * (len(traces) if len(_URL.value) == 1 else 1)
    key = Path(_KEY.value).read_text().strip() if _KEY.value else None

    async def run(bar: ProgressBar) -> list[Replayed]:
        targets = [Target(url=url, model=_MODEL.value or await served_model(url, key), api_key=key) for url in urls]
        return await replay_all(traces, targets, bar)

    with progress_bar("replay", sum(len(trace.requests) for trace in traces), "request") as bar:
        done = asyncio.run(run(bar))
    rows = [row_of(replayed, objective) for replayed in done]
    print(table(rows))
    for row in rows:
        for error in row["errors"]:
            print(f"{row['trace']}: {error}")
    if _OUT.value:
        out = Path(_OUT.value)
        requests = [[dataclasses.asdict(request) for request in replayed.requests] for replayed in done]
        out.write_text(json.dumps({"rows": rows, "requests": requests}, indent=1))
        plot(done, objective, out.with_suffix(".png"))
        print(f"Plot: {out.with_suffix('.png')}")


if __name__ == "__main__":
    entry.run(main, required=["url"], after_interrupt="Nothing was written.")
