"""After a commit an engine is, bit for bit, what a fresh load of the new checkpoint is; after a failed one, what it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose_gpu.vllm.environment import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

from common.transfer.errors import LayoutMismatchError
from rose_gpu.vllm.direct_update import sparse_update, whole_update
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.rank_weights import RankWeights
from rose_gpu.vllm.target import VllmWeightTarget
from rose_gpu.vllm.worker_weights import CommitError
from tests.conformance.driver import Driver, make_request, prompt
from tests.rose_gpu.vllm.small_models import SHAPE, checkpoint, engine, nudged, tensors, write_checkpoint

VOCAB = SHAPE["vocab_size"]


def parameters(of: VllmEngine) -> list[dict[str, bytes]]:
    """All parameters as vLLM holds them, padding included, of each rank."""
    return of.call_workers(_parameters_of)


def _parameters_of(worker: Any) -> dict[str, bytes]:
    import torch

    as_int = {2: torch.int16, 4: torch.int32}
    named = worker.model_runner.get_model().named_parameters()
    return {name: param.detach().view(-1).view(dtype=as_int[param.element_size()]).numpy().tobytes() for name, param in named}


def distribution(of: VllmEngine) -> list[tuple[tuple[int, float], ...]]:
    """Full-vocabulary log-probabilities along the greedy completion of a prompt that is in no cache."""
    driver = Driver(of)
    request = make_request("r", prompt(11, salt=5), max_tokens=6, temperature=0.0, num_top_logprobs=VOCAB)
    return list(driver.run_alone(request).top_logprobs)


@pytest.fixture
def closing() -> Iterator[list[VllmEngine]]:
    engines: list[VllmEngine] = []
    yield engines
    for each in engines:
        each.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_commit_equals_a_fresh_load(tmp_path: Path, closing: list[VllmEngine], dtype: str, tied: bool, ranks: int) -> None:
    """A sparse update there, all tensors back; parameters bit for bit and the full distribution after a fresh prompt."""
    old = tensors(0, dtype, tie_word_embeddings=tied)
    new = nudged(old, share=0.02)
    running = engine(checkpoint(0, dtype, tie_word_embeddings=tied), dtype=dtype, tensor_parallel=ranks)
    closing.append(running)
    before = parameters(running), distribution(running)
    assert len(before[0]) == ranks
    running.commit(sparse_update(old, new, base_version=0, version=1), version=1)
    after = parameters(running), distribution(running)

    folder = write_checkpoint(tmp_path / "new", new, tie_word_embeddings=tied)
    fresh = engine(folder, dtype=dtype, tensor_parallel=ranks)
    closing.append(fresh)
    assert after == (parameters(fresh), distribution(fresh))
    assert after[1] != before[1]
    running.commit(whole_update(old, version=2), version=2)
    assert (parameters(running), distribution(running)) == before


@pytest.mark.slow
def test_ranks_that_share_a_key_value_head_each_get_it(tmp_path: Path, closing: list[VllmEngine]) -> None:
    """One key-value head and two ranks: both hold it."""
    one_head: dict[str, Any] = {"num_kv_heads": 1}
    old = tensors(0, **one_head)
    new = nudged(old, share=0.02)
    running = engine(checkpoint(0, **one_head), tensor_parallel=2)
    closing.append(running)
    running.commit(sparse_update(old, new, base_version=0, version=1), version=1)
    fresh = engine(write_checkpoint(tmp_path / "new", new, **one_head), tensor_parallel=2)
    closing.append(fresh)
    assert parameters(running) == parameters(fresh)
    target = VllmWeightTarget(running)
    assert all(target.published(name).tobytes() == tensor.tobytes() for name, tensor in new.items())


def test_a_tied_head_follows_the_embedding(closing: list[VllmEngine]) -> None:
    """One element of the embedding of a token that is in no prompt: only the output head can notice."""
    old = tensors(0)
    new = {name: tensor.copy() for name, tensor in old.items()}
    new["model.embed_tokens.weight"][VOCAB - 1] += 1.0
    running = engine(checkpoint(0))
    closing.append(running)
    before = dict(distribution(running)[0])
    running.commit(sparse_update(old, new, base_version=0, version=1), version=1)
    after = dict(distribution(running)[0])
    assert abs(after[VOCAB - 1] - before[VOCAB - 1]) > 1e-3


def test_weights_that_arrive_narrower_are_widened_exactly(closing: list[VllmEngine]) -> None:
    """Published in bfloat16, computed in float32."""
    narrow = tensors(1, "bfloat16")
    running = engine(checkpoint(0), published_dtype="bfloat16")
    closing.append(running)
    running.commit(whole_update(narrow, version=1), version=1)
    wide = engine(checkpoint(0))
    closing.append(wide)
    wide.commit(whole_update({name: tensor.astype(np.float32) for name, tensor in narrow.items()}, version=1), version=1)
    assert parameters(running) == parameters(wide)
    target = VllmWeightTarget(running)
    for name, tensor in narrow.items():
        assert target.published(name).tobytes() == tensor.tobytes(), name


def test_a_commit_in_slices_equals_one_in_a_piece(closing: list[VllmEngine]) -> None:
    new = tensors(1)
    sliced, whole = engine(checkpoint(0)), engine(checkpoint(0))
    closing += [sliced, whole]
    num_pauses = 0
    for _ in sliced.commit_in_slices(whole_update(new, version=1), version=1, max_slice_bytes=20_000):
        num_pauses += 1
        distribution(whole)  # another engine steps meanwhile
        with pytest.raises(AssertionError, match="middle of a commit"):
            sliced.plan(None)  # type: ignore[arg-type]
    assert num_pauses > 3
    whole.commit(whole_update(new, version=1), version=1)
    assert parameters(sliced) == parameters(whole)
    assert sliced.load().weight_version == 1


def test_a_commit_given_up_half_way_leaves_the_old_version_whole(closing: list[VllmEngine]) -> None:
    running = engine(checkpoint(0))
    closing.append(running)
    before, answers = parameters(running), distribution(running)
    commit = running.commit_in_slices(whole_update(tensors(1), version=1), version=1, max_slice_bytes=20_000)
    next(commit)
    assert running._core.collective_rpc(_parameters_of) != before
    commit.close()
    assert parameters(running) == before
    assert running.load().weight_version == 0
    assert distribution(running) == answers


@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_a_worker_that_fails_in_mid_commit_restores_every_bit(
    closing: list[VllmEngine], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    running = engine(checkpoint(0))
    closing.append(running)
    before, answers = parameters(running), distribution(running)
    put, num_writes = RankWeights._put, 0

    def fail_later(self: RankWeights, *args: Any) -> None:
        nonlocal num_writes
        if num_writes == fails_at:
            raise MemoryError("no room for the displaced values")
        num_writes += 1
        put(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(RankWeights, "_put", fail_later)
        with pytest.raises(CommitError, match="no room for the displaced values"):
            running.commit(whole_update(tensors(1), version=1), version=1)
    assert parameters(running) == before
    assert running.load().weight_version == 0
    assert distribution(running) == answers
    running.commit(whole_update(tensors(1), version=1), version=1)
    assert parameters(running) != before


def test_a_tied_model_refuses_a_head_of_its_own(closing: list[VllmEngine]) -> None:
    running = engine(checkpoint(0))
    closing.append(running)
    untied = tensors(1, tie_word_embeddings=False)
    with pytest.raises(LayoutMismatchError, match=r"lm_head\.weight"):
        running.commit(whole_update(untied, version=1), version=1)


def test_what_is_read_is_what_was_loaded(closing: list[VllmEngine]) -> None:
    running = engine(checkpoint(0, tie_word_embeddings=False))
    closing.append(running)
    target = VllmWeightTarget(running)
    expected = tensors(0, tie_word_embeddings=False)
    assert set(target.specs()) == set(expected)
    for name, tensor in expected.items():
        assert target.published(name).tobytes() == tensor.tobytes(), name
