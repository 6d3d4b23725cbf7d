"""Workers that fetch for themselves: the engine holds each published version, bit for bit, on all ranks or on none."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rose_gpu.vllm.environment import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

from common.transfer.errors import FingerprintMismatchError, LayoutMismatchError
from common.transfer.publisher import Publisher
from common.transfer.shards import build_layout
from common.transfer.store.directory import DirectoryStore
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.group import WorkerGroup
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.rank_subscriber import RankSubscriber
from rose_gpu.vllm.rank_weights import RankWeights
from rose_gpu.vllm.store_address import StoreAddress
from rose_gpu.vllm.target import VllmWeightTarget
from rose_gpu.vllm.worker_weights import CommitError
from tests.rose_gpu.vllm.small_models import checkpoint, engine, nudged, tensors

fine_layout = functools.partial(build_layout, min_run_bytes=512)
Tensors = dict[str, np.ndarray]


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(DirectoryStore(tmp_path), lay_out=fine_layout, anchor_interval=100)
    yield publisher
    publisher.close()


@pytest.fixture
def running() -> Iterator[VllmEngine]:
    running = engine(checkpoint(0))
    yield running
    running.close()


def follow(subscriber: RankSubscriber) -> int:
    """Stage and commit the newest version; returns the bytes it took."""
    staged = subscriber.stage()
    assert staged is not None
    assert subscriber.stage() is staged
    subscriber.commit(staged)
    assert subscriber.stage() is None
    return staged.wire_bytes


def assert_holds(of: VllmEngine | WorkerGroup, published: Tensors) -> None:
    target = VllmWeightTarget(of)
    for name, tensor in published.items():
        assert target.published(name).tobytes() == tensor.tobytes(), name


def test_an_engine_whose_worker_fetches_holds_every_version(tmp_path: Path, publisher: Publisher, running: VllmEngine) -> None:
    subscriber = RankSubscriber(running, StoreAddress(where=str(tmp_path)), receiver_id="r")
    model = tensors(1)
    for version in range(3):
        publisher.publish(version, model).result(30)
        follow(subscriber)
        assert subscriber.version == version
        assert running.load().weight_version == version
        assert_holds(running, model)
        model = nudged(model, share=0.02, seed=version)


def test_a_write_that_fails_leaves_the_old_version_and_can_be_repeated(
    tmp_path: Path, publisher: Publisher, running: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = RankSubscriber(running, StoreAddress(where=str(tmp_path)), receiver_id="r")
    first = tensors(1)
    publisher.publish(0, first).result(30)
    follow(subscriber)
    second = nudged(first, share=0.1)
    publisher.publish(1, second).result(30)
    staged = subscriber.stage()
    assert staged is not None
    write, num_written = RankWeights.write, 0

    def failing(self: RankWeights, run: object) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == 3:
            raise MemoryError("out of memory")
        write(self, run)  # type: ignore[arg-type]

    monkeypatch.setattr(RankWeights, "write", failing)
    with pytest.raises(CommitError, match="out of memory"):
        subscriber.commit(staged)
    assert subscriber.version == 0
    assert_holds(running, first)
    monkeypatch.undo()
    subscriber.commit(staged)
    assert_holds(running, second)


def test_errors_of_a_rank_arrive_with_their_type_and_the_next_version_repairs(
    tmp_path: Path, publisher: Publisher, running: VllmEngine
) -> None:
    subscriber = RankSubscriber(running, StoreAddress(where=str(tmp_path)), receiver_id="r")
    model = tensors(1)
    publisher.publish(0, model).result(30)
    follow(subscriber)
    drifting = running._core.model_executor.driver_worker.worker.model_runner.get_model()
    next(drifting.parameters()).data += 1
    model = nudged(model, share=0.3)
    publisher.publish(1, model).result(30)
    with pytest.raises(FingerprintMismatchError, match="rank 0"):
        subscriber.stage()
    publisher.close()
    again = Publisher(DirectoryStore(tmp_path), lay_out=fine_layout)
    again.publish(2, model).result(30)
    follow(subscriber)
    assert_holds(running, model)
    again.close()


def test_a_tensor_without_target_is_refused(tmp_path: Path, publisher: Publisher, running: VllmEngine) -> None:
    subscriber = RankSubscriber(running, StoreAddress(where=str(tmp_path)), receiver_id="r")
    publisher.publish(0, {**tensors(1), "stray.weight": np.zeros(4, np.float32)}).result(30)
    with pytest.raises(LayoutMismatchError, match=r"stray\.weight"):
        subscriber.stage()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_each_fetch_their_part(tmp_path: Path, publisher: Publisher, tied: bool) -> None:
    group = WorkerGroup(
        VllmOptions(model_dir=checkpoint(0, tie_word_embeddings=tied), max_slots=4, max_context_tokens=64, tensor_parallel=2)
    )
    try:
        subscriber = RankSubscriber(group, StoreAddress(where=str(tmp_path)), receiver_id="r")
        model = tensors(1, tie_word_embeddings=tied)
        for version in range(3):
            report = publisher.publish(version, model).result(30)
            fetched_bytes = follow(subscriber)
            assert_holds(group, model)
            assert fetched_bytes < 1.6 * report.wire_bytes + 60_000  # two whole copies would be twice as much
            model = nudged(model, share=0.02, seed=version)
    finally:
        group.close()
