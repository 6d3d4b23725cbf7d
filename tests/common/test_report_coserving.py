"""The arithmetic of a run's report on co-serving, from rows as they are logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.metrics import RunLog
from common.report_coserving import coserving_row, read_coserving, write_coserving
from common.traffic.log import TRAFFIC

START = {"kind": "start", "at_s": 0.0, "trace": "azure, outputs x 0.1", "ttft_s": 0.3, "tpot_s": 0.05}


def request(
    at_s: float, *, ttft_s: float | None = 0.1, tpot_s: float | None = 0.01, met: bool = True, **more: Any
) -> dict[str, Any]:
    return {
        "kind": "request",
        "at_s": at_s,
        "prompt_tokens": 10,
        "output_tokens": 5,
        "whole": True,
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
        "longest_gap_s": tpot_s,
        "late_s": 0.001,
        "met": met,
        "met_every_gap": met,
        "error": None,
        **more,
    }


def device(at_s: float, *, rollout_s: float, serving_s: float = 0.0, tokens: float = 0.0, **done: float) -> dict[str, Any]:
    return {
        "kind": "device",
        "at_s": at_s,
        "level": "open",
        "level_s": {"open": at_s, "idle_only": 0.0, "stopped": 0.0},
        "device_s": {"serving": serving_s, "rollout": rollout_s},
        "num_done": done,
        "rollout_tokens": tokens,
    }


LOG_ROWS: list[dict[str, Any]] = [
    {"phase": "warmup", "step": 1, "warmup_s": 5.0},
    {"phase": "train", "step": 1, "rollout_s": 2.0, "tokens_dedicated": 300, "tokens_shared": 100},
    {"phase": "train", "step": 2, "rollout_s": 3.0, "tokens_dedicated": 300, "tokens_shared": 300},
]


def test_borrowed_capacity_is_the_share_and_the_rate_of_tokens_from_there() -> None:
    row = coserving_row("shared", [START, request(1.0)], LOG_ROWS)
    assert (row["rollout_tokens"], row["all_rollout_tokens"]) == (400, 1000)
    assert row["rollout_share"] == pytest.approx(0.4)
    assert (row["rollout_tokens_per_s"], row["all_rollout_tokens_per_s"]) == (80.0, 200.0)


def test_failed_requests_have_missed_and_their_errors_are_told() -> None:
    failed = request(2.0, ttft_s=None, tpot_s=None, met=False, whole=False, error="status 503: no")
    row = coserving_row("shared", [START, request(1.0), request(1.5, met=False), failed], LOG_ROWS)
    assert (row["num_requests"], row["num_failed"], row["errors"]) == (3, 1, ["status 503: no"])
    assert row["attainment"] == pytest.approx(1 / 3)
    assert (row["ttft_p50_ms"], row["tpot_p99_ms"]) == (pytest.approx(100.0), pytest.approx(10.0))
    assert (row["ttft_objective_ms"], row["tpot_objective_ms"]) == (300.0, 50.0)
    assert row["output_tokens"] == 10


def test_requests_beside_rollouts_are_those_that_arrived_while_rollouts_had_steps() -> None:
    polls = [device(0.0, rollout_s=0.0), device(1.0, rollout_s=0.0), device(2.0, rollout_s=0.4), device(3.0, rollout_s=0.4)]
    requests = [request(0.5), request(1.5, ttft_s=0.5, met=False), request(1.9), request(2.5), request(9.0)]
    row = coserving_row("shared", [START, *polls, *requests], LOG_ROWS)
    assert (row["num_beside_rollouts"], row["attainment_beside_rollouts"]) == (2, 0.5)
    assert row["attainment_without_rollouts"] == 1.0
    assert row["ttft_p99_ms_without_rollouts"] == pytest.approx(100.0)
    assert row["ttft_p99_ms_beside_rollouts"] > 400.0


def test_sums_of_a_device_that_was_started_again_are_added_up() -> None:
    polls = [
        device(10.0, rollout_s=1.0, park=1, slice=10),
        device(14.0, rollout_s=3.0, park=2, slice=30),
        device(1.0, rollout_s=0.5, slice=5) | {"at_s": 20.0},
        device(3.0, rollout_s=1.0, park=1, slice=9) | {"at_s": 22.0},
    ]
    row = coserving_row("shared", [START, *polls, request(11.0)], LOG_ROWS)
    assert row["device_s"]["rollout"] == pytest.approx(3.0 - 1.0 + 1.0)
    assert row["observed_s"] == pytest.approx(14.0 - 10.0 + 3.0)
    assert (row["num_parked"], row["num_commit_slices"]) == (2, 29)


def test_a_run_that_was_never_polled_or_trained_is_reported_too() -> None:
    row = coserving_row("shared", [START, request(1.0)], [])
    assert (row["rollout_share"], row["rollout_tokens_per_s"], row["observed_s"]) == (None, 0.0, 0.0)
    assert row["attainment_beside_rollouts"] is None


def test_the_report_has_a_section_a_picture_and_a_json_row_for_each_replica(tmp_path: Path) -> None:
    rows = [START, device(1.0, rollout_s=0.0), request(1.5), device(2.0, rollout_s=0.5, tokens=50.0), device(3.0, rollout_s=0.9)]
    (tmp_path / TRAFFIC).mkdir()
    (tmp_path / TRAFFIC / "shared.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / TRAFFIC / "silent.jsonl").write_text(json.dumps(START) + "\n")  # nothing was sent
    log = RunLog(tmp_path, after={})
    log.rows += LOG_ROWS
    found = read_coserving(log, tmp_path)
    assert [each.row["replica"] for each in found] == ["shared"]
    text = "\n".join(write_coserving(found, tmp_path))
    log.close()
    for words in ("Online traffic on shared", "400 of 1000 rollout tokens, 40.0%", "level of caution", "| idle | 1.1 |", "100.0%"):
        assert words in text
    assert (tmp_path / TRAFFIC / "shared.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "coserving.json").read_text())["rows"][0]["rollout_share"] == pytest.approx(0.4)
    assert "40.0% of the rollout's tokens were borrowed there: 80 of 200 tokens/s" in "\n".join(found[0].lines())


def test_a_run_without_online_traffic_has_none_of_it(tmp_path: Path) -> None:
    log = RunLog(tmp_path, after={})
    found = read_coserving(log, tmp_path)
    assert write_coserving(found, tmp_path) == []
    log.close()
    assert not (tmp_path / "coserving.json").exists()
