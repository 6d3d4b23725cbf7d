"""replay_trace against a server of a few lines: rows, table, plot, and the rollout tokens that the server reports."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from common.progress import progress_bar
from common.serving.coserving.objectives import Objective
from common.traffic.openai_stream import Target
from scripts import replay_trace
from tests.common.traffic.test_replay import server, stream, trace

OBJECTIVE = Objective(ttft_s=30.0, tpot_s=10.0)


def replayed(monkeypatch: pytest.MonkeyPatch) -> list[replay_trace.Replayed]:
    monkeypatch.setattr(replay_trace, "POLL_S", 0.05)
    replay_trace._FLAGS(["test"])

    async def work() -> list[replay_trace.Replayed]:
        async with server(stream) as first, server(stream) as second:
            targets = [Target(url=url, model="m") for url in (first, second)]
            traces = [trace(0.0, 0.1, 0.2), trace(0.05, 0.15)]
            with progress_bar("replay", 5, "request") as bar:
                return await replay_trace.replay_all(traces, targets, bar)

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_several_traces_run_together_and_each_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = replayed(monkeypatch)
    rows = [replay_trace.row_of(one, OBJECTIVE) for one in done]
    assert [row["num_requests"] for row in rows] == [row["num_whole"] for row in rows] == [3, 2]
    assert [row["attainment"] for row in rows] == [1.0, 1.0]
    assert all(row["ttft_p50_ms"] > 0 and row["latest_send_ms"] >= 0 and row["errors"] == [] for row in rows)
    assert all(row["rollout_tokens_per_s"] > 0 for row in rows)
    assert "met" in replay_trace.table(rows)
    replay_trace.plot(done, OBJECTIVE, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_flags_cut_and_scale_the_trace() -> None:
    replay_trace._FLAGS(["test", "--trace=azure2023_conv_pub", "--window=0,20", "--time=2", "--prompts=0.1", "--outputs=0.5"])
    (cut,) = replay_trace.traces_of_flags()
    assert cut.description == "azure2023_conv_pub, 0-20 s, time x 2, prompts x 0.1, outputs x 0.5"
    assert cut.span_s == 40.0
    replay_trace._FLAGS(["test", "--window=0,x"])
    with pytest.raises(ValueError, match=r"--window=0,x must be START,END"):
        replay_trace.traces_of_flags()
