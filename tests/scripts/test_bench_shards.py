"""The arithmetic of bench_shards at real sizes, and the live check with a learner in two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.transfer.rank_boxes import ranks
from rose_gpu.vllm.environment import installed_vllm
from scripts.bench_shards import EIGHT, ONE, QWEN3_8B, TWO, Learner, layout_of, rank_bytes


@pytest.mark.parametrize("learner", [ONE, TWO, EIGHT])
def test_ranks_of_an_8b_model_fetch_what_they_own_whatever_the_learner(learner: Learner) -> None:
    layout = layout_of(QWEN3_8B, learner)
    assert {bucket.writer for bucket in layout.buckets} == set(range(learner.processes))
    for rank in (ranks(QWEN3_8B, 8, 2)[9], ranks(QWEN3_8B, 16, 1)[3]):
        owned, fetched = rank_bytes(layout, QWEN3_8B, rank)
        for tensor_idx, owned_bytes in owned.items():
            assert owned_bytes <= fetched[tensor_idx] <= 1.1 * owned_bytes, layout.tensors[tensor_idx].name


def run_check(tmp_path: Path, replica: str) -> list[dict]:
    out = tmp_path / "live.json"
    command = [sys.executable, "-m", "scripts.check_shards", "--versions=3", f"--replicas={replica}", f"--out={out}"]
    subprocess.run(command, check=True, timeout=900)
    rows: list[dict] = json.loads(out.read_text())["rows"]
    assert [row["version"] for row in rows] == [1, 2, 3]
    assert all(row["differing"] == [] and row["tensors"] > 20 for row in rows)
    return rows


@pytest.mark.slow
def test_a_jetstream_replica_of_two_devices_follows_a_learner_of_two_processes(tmp_path: Path) -> None:
    run_check(tmp_path, "jetstream")


@pytest.mark.slow
@pytest.mark.skipif(installed_vllm() is None, reason="vLLM is not installed: see requirements/serve-cpu.txt")
def test_a_vllm_replica_of_two_ranks_follows_a_learner_of_two_processes(tmp_path: Path) -> None:
    run_check(tmp_path, "vllm")
