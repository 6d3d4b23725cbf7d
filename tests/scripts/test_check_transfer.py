"""Kills in mid-transfer, and what the scripts around transfer say."""

from pathlib import Path

import pytest

from scripts import check_transfer, predict_transfer


@pytest.mark.slow
def test_whoever_is_killed_in_mid_transfer_every_replica_ends_whole_and_up_to_date(tmp_path: Path) -> None:
    rows, torn = check_transfer.check(tmp_path, num_kills=6, num_replicas=3, seed=1)
    assert torn == []
    assert [row["victim"] for row in rows] == ["learner", "relay", "peer"] * 2
    assert check_transfer.summary(rows, torn)["kills"] == {"learner": 2, "relay": 2, "peer": 2}


def test_predictions_for_large_models_are_ordered_as_they_must_be() -> None:
    rows = predict_transfer.rows(density=0.01)
    assert len(rows) == len(predict_transfer.SETUPS) * len(predict_transfer.GBIT_S)
    for row in rows:
        assert float(str(row["seconds"])) <= float(str(row["seconds_direct"])) + 0.1
        assert float(str(row["seconds_direct"])) < float(str(row["seconds_full_direct"]))
