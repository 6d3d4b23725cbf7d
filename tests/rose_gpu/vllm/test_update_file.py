"""A staged update survives the way through a file; anything less than a whole file is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.transfer.staging import StagedUpdate
from rose_gpu.vllm.direct_update import sparse_update, whole_update
from rose_gpu.vllm.update_file import read_update, write_update

RNG = np.random.default_rng(0)
OLD = {"a.weight": RNG.standard_normal((33, 7), np.float32), "b.weight": RNG.standard_normal(5, np.float32)}
NEW = {name: np.where(RNG.random(tensor.shape) < 0.3, tensor + 1, tensor).astype(np.float32) for name, tensor in OLD.items()}
UPDATES = {
    "whole": whole_update(NEW, version=3),
    "sparse": sparse_update(OLD, NEW, base_version=2, version=3),
    "empty": sparse_update(OLD, OLD, base_version=2, version=3),
}


@pytest.mark.parametrize("name", sorted(UPDATES))
def test_what_is_read_is_what_was_written(tmp_path: Path, name: str) -> None:
    update = UPDATES[name]
    write_update(update, tmp_path / "update")
    read = read_update(tmp_path / "update")
    assert (read.layout, read.lineage, read.base_version, read.version) == (
        update.layout,
        update.lineage,
        update.base_version,
        update.version,
    )
    assert set(read.runs) == set(update.runs)
    for run, staged in update.runs.items():
        assert read.runs[run].bits.tobytes() == staged.bits.tobytes()
        assert (read.runs[run].local is None) == (staged.local is None)
        if staged.local is not None:
            assert read.runs[run].local.tolist() == staged.local.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_cut_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "update"
    write_update(UPDATES["whole"], path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="update is not a whole staged update"):
        read_update(path)


def test_a_sparse_update_holds_only_what_changed() -> None:
    update: StagedUpdate = UPDATES["sparse"]
    changed = sum(int((OLD[name] != NEW[name]).sum()) for name in OLD)
    assert 0 < update.staged_elements == changed < sum(tensor.size for tensor in OLD.values())
