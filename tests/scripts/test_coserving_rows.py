"""What a co-serving benchmark computes from latencies: objectives, attainments, harvest, paired intervals; and what it resumes."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.serving.coserving.objectives import LengthClasses
from common.traffic.trace import Trace, TraceRequest
from scripts import bench_coserving
from scripts.coserving_rows import Measured, Row, bootstrap, compare, complete, quartiles, table

MEASURED = Measured(classes=LengthClasses(bounds=(10,)), unloaded_s={"length0": 0.01, "length1": 0.1})


def row(variant: str, ttfts_s: list[float], *, repeat: int = 0, tpot_s: float = 0.01, rate: float = 0.0, share: float = 0.5) -> Row:
    requests: list[list[Any]] = [[5, True, ttft_s, tpot_s, 2 * tpot_s] for ttft_s in ttfts_s]
    return {
        "variant": variant,
        "repeat": repeat,
        "requests": requests,
        "serving_share": share,
        "rollout_tokens_per_s": rate,
        "rollout_tokens_by_bin": [int(5 * rate)] * 4,
    }


def test_a_ttft_objective_is_the_smaller_of_the_p99s_and_ten_times_unloaded() -> None:
    objectives = MEASURED.objectives([row("serving_alone", [0.02] * 100)], (1.6, 1.27))
    assert objectives["length0"].ttft_s == pytest.approx(1.6 * 0.02)
    slow = MEASURED.objectives([row("serving_alone", [0.5] * 100)], (1.6, 1.27))
    assert (slow["length0"].ttft_s, slow["length1"].ttft_s) == (pytest.approx(0.1), pytest.approx(0.8))
    assert slow["length1"].tpot_s == pytest.approx(1.27 * 0.01)


def test_failed_and_late_requests_are_missed_and_gaps_are_judged_apart() -> None:
    alone = [row("serving_alone", [0.02] * 100)]
    mixed = row("ours", [0.02, 0.02, 0.9])
    mixed["requests"].append([5, False, 0.01, 0.01, 0.01])
    mixed["requests"].append([5, False, None, None, 0.0])
    done = complete(mixed, MEASURED, alone, 100.0)
    assert done["attainment"] == pytest.approx(2 / 5)
    assert done["attainment_every_gap"] == 0.0
    assert done["attainment_2x"] == pytest.approx(2 / 5)


def test_harvest_is_over_what_idle_time_could_give() -> None:
    alone = [row("serving_alone", [0.02] * 100, share=0.6)]
    assert complete(row("ours", [0.02], rate=30.0), MEASURED, alone, 100.0)["harvest"] == pytest.approx(30 / (100 * 0.4))


def test_differences_are_paired_and_their_intervals_hold_the_truth() -> None:
    rng = np.random.default_rng(0)
    mean, low, high = bootstrap(rng.normal(0.3, 1.0, 1000))
    assert low < 0.3 < high
    assert mean == pytest.approx(0.3, abs=0.1)
    rows = [
        row("serving_alone", [0.02] * 50, repeat=0),
        row("idle_only", [0.02] * 50, repeat=0, rate=20.0),
        row("ours", [0.02] * 45 + [0.9] * 5, repeat=0, rate=30.0),
    ]
    pooled = {result["variant"]: result for result in compare(rows, MEASURED, 100.0)}
    assert pooled["ours"]["attainment_minus_alone"][0] == pytest.approx(-0.1)
    assert pooled["ours"]["harvest_minus_idle_only"] == pytest.approx((0.2, 0.2, 0.2))
    assert pooled["idle_only"]["attainment_minus_alone"] == (0.0, 0.0, 0.0)
    assert "ours" in table(list(pooled.values()))


def test_quartiles_split_prompts_evenly_and_equal_ones_not_at_all() -> None:
    classes = quartiles(range(1, 101))
    counts = collections.Counter(map(classes.class_of, range(1, 101)))
    assert sorted(counts.values()) == [25, 25, 25, 25]
    assert len(quartiles([7] * 20).bounds) == 1


def test_variants_alternate_and_serving_alone_comes_first() -> None:
    flags = bench_coserving._FLAGS
    flags(["test"])
    order = list(bench_coserving.plan(["serving_alone", "naive", "idle_only", "ours"], 600))
    assert order == [
        ("serving_alone", 0),
        ("naive", 0),
        ("idle_only", 0),
        ("ours", 0),
        ("serving_alone", 1),
        ("idle_only", 1),
        ("ours", 1),
    ]


def test_rows_of_other_code_are_not_resumed(tmp_path: Path) -> None:
    flags = bench_coserving._FLAGS
    out = tmp_path / "rows.json"
    flags(["test", "--resume"])
    trace = Trace(name="t", requests=(TraceRequest(arrival_s=0.0, prompt_tokens=1, output_tokens=1),), span_s=1.0)
    fresh = bench_coserving.open_report(out, trace)
    assert fresh["rows"] == []
    out.write_text(json.dumps(fresh | {"rows": [{"variant": "ours"}]}))
    assert bench_coserving.open_report(out, trace)["rows"] == [{"variant": "ours"}]
    out.write_text(json.dumps(fresh | {"code": "other"}))
    with pytest.raises(ValueError, match="has rows of code 'other'"):
        bench_coserving.open_report(out, trace)
