"""check_fleet on logs whose faults are known: what was trained twice, or never, or by nobody, is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.config import Config
from common.rollout.evaluate import number_ranges, numbers_in, token_shares
from scripts.check_fleet import Kill, judge, least_of
from scripts.fleet import LOGS

KILL = Kill(replica="left", part="front", after_version=2, share=0.5)
NEWS = "Lost replica left: it ended by itself; process 7 was ended by SIGKILL\nReplica left has caught up and serves version 3\n"


def config() -> Config:
    config = Config()
    config.num_versions = 4
    config.grpo.prompts_per_step, config.grpo.group_size = 2, 4
    return config


def workdir(folder: Path, *, trained: tuple[str, ...], news: str = NEWS, tokens_last: int = 30) -> Path:
    (folder / LOGS).mkdir()
    (folder / LOGS / "fleet.log").write_text(news)
    rows: list[dict[str, object]] = [
        {
            "phase": "train",
            "step": version,
            "trajectories": trajectories,
            "tokens_left": 10 if version <= 2 else 30 if version == 3 else tokens_last,
            "tokens_right": 30,
        }
        for version, trajectories in enumerate(trained, start=1)
    ]
    rows += [{"phase": "eval", "step": version, "sampled": sampled} for version, sampled in ((0, 0.3), (4, 0.8))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


WHOLE = ("0-7", "8-15", "16-23", "24-31")


def test_a_run_in_which_everything_was_trained_once_is_good(tmp_path: Path) -> None:
    row = judge(config(), workdir(tmp_path, trained=WHOLE), KILL, least=0.75)
    assert row["ok"] is True
    assert (row["versions"], row["trajectories"], row["missing"], row["twice"]) == (4, 32, 0, 0)
    assert (row["share_before"], row["share_after"], row["share_last"]) == (0.25, 0.5, 0.5)


@pytest.mark.parametrize(
    ("fault", "column", "value"),
    [
        ({"trained": ("0-7", "8-15", "8-15", "24-31")}, "twice", 8),
        ({"trained": ("0-7", "8-14", "16-23", "24-31")}, "missing", 1),
        ({"trained": WHOLE[:3]}, "versions", 3),
        ({"trained": WHOLE, "news": ""}, "lost", 0),
        ({"trained": WHOLE, "news": 2 * NEWS}, "lost", 2),
        ({"trained": WHOLE, "tokens_last": 0}, "share_last", 0.0),
    ],
)
def test_each_fault_is_seen(tmp_path: Path, fault: dict, column: str, value: float) -> None:
    row = judge(config(), workdir(tmp_path, **fault), KILL, least=None)
    assert row[column] == value
    assert row["ok"] is False


def test_success_below_the_seeds_is_seen(tmp_path: Path) -> None:
    spread = tmp_path / "learning.json"
    seeds = [{"sampled_after": rate, "sampled_after_stderr": 0.02} for rate in (0.90, 0.85)]
    spread.write_text(json.dumps({"rows": seeds}))
    least = least_of(spread)
    assert least == pytest.approx(0.83)
    assert judge(config(), workdir(tmp_path, trained=WHOLE), KILL, least=least)["ok"] is False


@pytest.mark.parametrize("numbers", [[], [5], [0, 1, 2, 3], [0, 2, 3, 9], [4, 4, 5]])
def test_numbers_survive_as_ranges(numbers: list[int]) -> None:
    assert numbers_in(number_ranges(numbers)) == numbers


def test_ranges_are_short() -> None:
    assert number_ranges([9, 1, 0, 2, 3]) == "0-3,9"


def test_shares_are_of_all_rows_together() -> None:
    assert token_shares([{"tokens_a": 1, "tokens_b": 3, "loss": 2.0}, {"tokens_a": 4}]) == {"share_a": 0.625, "share_b": 0.375}
    assert token_shares([{"sampled_tokens": 4}]) == {}
