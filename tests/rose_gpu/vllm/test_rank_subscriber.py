"""Two ranks without vLLM: workers over plain torch modules that say of themselves what vLLM's layers say. All commit, or none."""

from __future__ import annotations

import dataclasses
import errno
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.transfer.errors import LayoutMismatchError, TransferTimeoutError, VersionGoneError
from common.transfer.publisher import Publisher
from common.transfer.shards import build_layout
from common.transfer.store.directory import DirectoryStore
from rose_gpu.vllm.rank_methods import RankMethods
from rose_gpu.vllm.rank_subscriber import RankError, RankSubscriber
from rose_gpu.vllm.rank_weights import RankWeights
from rose_gpu.vllm.store_address import StoreAddress
from rose_gpu.vllm.worker_weights import CommitError, RankUpdate, WorkerWeights

RANKS, ROWS, COLUMNS = 2, 64, 48
fine_layout = functools.partial(build_layout, min_run_bytes=256)


class Layer(torch.nn.Module):
    """A layer with one weight; keyword arguments are what vLLM's linear layers carry."""

    def __init__(self, shape: tuple[int, ...], **described: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
        for name, value in described.items():
            setattr(self, name, value)


class Model(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        place = {"tp_rank": rank, "tp_size": RANKS}
        self.up_proj = Layer((ROWS // RANKS, COLUMNS), output_partition_sizes=[ROWS // RANKS], **place)
        self.down_proj = Layer((COLUMNS, ROWS // RANKS), input_is_parallel=True, input_size=ROWS, **place)
        self.norm = Layer((COLUMNS,))
        if rank == 1:
            self.last = Layer((COLUMNS,))  # as on the last of several pipeline stages


class Worker(RankMethods):
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = Model(rank)
        self.rose_weights = RankWeights(self.model, "float32")

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.rose_weights.specs()


class Engine:
    """What a RankSubscriber needs of an engine: its workers, and a commit."""

    def __init__(self) -> None:
        self.workers = [Worker(rank) for rank in range(RANKS)]
        self.weights = WorkerWeights(self.rpc, "float32", num_workers=RANKS)
        self.version: int | None = None

    def rpc(self, method: str, args: tuple = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]

    def commit_in_slices(self, weights: RankUpdate, *, version: int) -> Iterator[None]:
        yield from self.weights.commit_staged(weights, max_slice_bytes=2000)
        self.version = version

    def assert_holds(self, published: dict[str, np.ndarray]) -> None:
        for rank, worker in enumerate(self.workers):
            rows = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
            held = {name: tensor.numpy() for name, tensor in worker.model.state_dict().items()}
            np.testing.assert_array_equal(held["up_proj.weight"], published["up_proj.weight"][rows])
            np.testing.assert_array_equal(held["down_proj.weight"], published["down_proj.weight"][:, rows])
            np.testing.assert_array_equal(held["norm.weight"], published["norm.weight"])
        np.testing.assert_array_equal(held["last.weight"], published["last.weight"])


def make_model(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"up_proj.weight": (ROWS, COLUMNS), "down_proj.weight": (COLUMNS, ROWS), "norm.weight": (COLUMNS,)}
    shapes["last.weight"] = (COLUMNS,)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def changed(model: dict[str, np.ndarray], seed: int, share: float = 0.05) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: np.where(rng.random(array.shape) < share, array * 1.5, array).astype(np.float32) for name, array in model.items()}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(DirectoryStore(tmp_path), lay_out=fine_layout, anchor_interval=100)
    yield publisher
    publisher.close()


def subscribe(engine: Engine, tmp_path: Path) -> RankSubscriber:
    return RankSubscriber(engine, StoreAddress(where=str(tmp_path), timeout_s=5.0), receiver_id="r")


def test_every_rank_holds_its_part_of_every_version(tmp_path: Path, publisher: Publisher) -> None:
    engine, model = Engine(), make_model(0)
    subscriber = subscribe(engine, tmp_path)
    assert sorted(engine.weights.specs()) == sorted(model)
    for version, share in enumerate([1.0, 0.05, 0.6, 0.0]):
        model = changed(model, version, share)
        report = publisher.publish(version, model).result(10)
        staged = subscriber.stage()
        assert staged is not None
        assert subscriber.stage() is staged
        if version == 0:
            assert staged.wire_bytes < 1.2 * report.wire_bytes  # indexes and manifest twice, runs once
        subscriber.commit(staged)
        subscriber.commit(staged)
        assert subscriber.version == engine.version == version
        engine.assert_holds(model)
        assert subscriber.stage() is None


def test_if_one_rank_cannot_write_none_does(tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, first = Engine(), make_model(0)
    subscriber = subscribe(engine, tmp_path)
    publisher.publish(0, first).result(10)
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    second = changed(first, 1, 0.3)
    publisher.publish(1, second).result(10)
    staged = subscriber.stage()
    assert staged is not None
    weights, write, num_written = engine.workers[1].rose_weights, RankWeights.write, 0

    def failing(run: Any) -> None:
        nonlocal num_written
        num_written += 1
        if num_written > 2:
            raise MemoryError("out of memory")
        write(weights, run)

    monkeypatch.setattr(weights, "write", failing)
    with pytest.raises(CommitError, match="out of memory"):
        subscriber.commit(staged)
    assert (subscriber.version, engine.version) == (0, 0)
    engine.assert_holds(first)
    monkeypatch.undo()
    subscriber.commit(staged)
    engine.assert_holds(second)


def test_a_commit_that_is_given_up_half_way_leaves_the_old_version(tmp_path: Path, publisher: Publisher) -> None:
    engine, first = Engine(), make_model(0)
    subscriber = subscribe(engine, tmp_path)
    publisher.publish(0, first).result(10)
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    second = changed(first, 1, 0.5)
    publisher.publish(1, second).result(10)
    staged = subscriber.stage()
    assert staged is not None
    slices = subscriber.commit_in_slices(staged)
    next(slices)
    next(slices)
    slices.close()  # type: ignore[attr-defined]
    engine.assert_holds(first)
    subscriber.commit(staged)
    engine.assert_holds(second)


def test_parameters_that_were_loaded_anew_are_found_where_they_are_now(tmp_path: Path, publisher: Publisher) -> None:
    engine, model = Engine(), make_model(0)
    subscriber = subscribe(engine, tmp_path)
    for version in range(2):
        model = changed(model, version)
        publisher.publish(version, model).result(10)
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        engine.assert_holds(model)
        for worker in engine.workers:
            worker.model.up_proj.weight.data = worker.model.up_proj.weight.data.clone()


def test_a_rank_that_holds_other_boxes_than_before_is_an_error_and_then_takes_an_anchor(
    tmp_path: Path, publisher: Publisher
) -> None:
    engine, model = Engine(), make_model(0)
    subscriber = subscribe(engine, tmp_path)
    publisher.publish(0, model).result(10)
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    for worker in engine.workers:
        worker.model.up_proj.tp_rank = 1 - worker.rank
    publisher.publish(1, changed(model, 1)).result(10)
    with pytest.raises(LayoutMismatchError, match="other boxes"):
        subscriber.stage()


def republished(tmp_path: Path, version: int, model: dict[str, np.ndarray]) -> None:
    """A publisher that starts anew and publishes a version of that number."""
    publisher = Publisher(DirectoryStore(tmp_path), lay_out=fine_layout, anchor_interval=100)
    publisher.publish(version, model).result(10)
    publisher.close()


def test_a_publisher_that_starts_anew_with_the_version_held_is_followed(tmp_path: Path) -> None:
    engine = Engine()
    subscriber = subscribe(engine, tmp_path)
    for life in range(2):
        republished(tmp_path, 3, make_model(life))
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        engine.assert_holds(make_model(life))
    assert subscriber.stage() is None


def test_ranks_that_stage_different_lives_of_a_publisher_commit_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    subscriber = subscribe(engine, tmp_path)
    republished(tmp_path, 3, make_model(0))
    late, start = engine.workers[1], engine.workers[1].start_staging

    def start_after_the_restart(version: int) -> str | None:
        while engine.workers[0].staging_state()["running"]:
            time.sleep(0.001)
        republished(tmp_path, 3, make_model(1))
        return start(version)

    monkeypatch.setattr(late, "start_staging", start_after_the_restart)
    with pytest.raises(VersionGoneError, match=r"rank [01] has staged .*stage again"):
        subscriber.stage()
    monkeypatch.undo()
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    engine.assert_holds(make_model(1))


def test_an_update_that_stalls_is_passed_over_for_the_newest_that_is_whole(tmp_path: Path, publisher: Publisher) -> None:
    engine, model = Engine(), make_model(0)
    subscriber = RankSubscriber(engine, StoreAddress(where=str(tmp_path), timeout_s=0.3), receiver_id="r")
    publisher.publish(0, model).result(10)
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    model = changed(model, 1)
    publisher.publish(1, model).result(10)
    store = DirectoryStore(tmp_path)
    store.open(dataclasses.replace(store.catalog().entries[-1].head, version=2, base_version=1))  # and its publisher is gone
    with pytest.raises(TransferTimeoutError, match="v2/delta"):
        subscriber.stage()
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    assert subscriber.version == 1
    engine.assert_holds(model)


def test_a_confirmation_that_cannot_be_written_does_not_undo_a_commit(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = Engine(), make_model(0)
    subscriber = subscribe(engine, tmp_path)
    publisher.publish(0, model).result(10)
    staged = subscriber.stage()
    assert staged is not None

    def disk_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DirectoryStore, "confirm", disk_full)
    subscriber.commit(staged)
    assert (subscriber.version, engine.version) == (0, 0)
    engine.assert_holds(model)


def test_what_no_rank_has_and_what_is_no_rank_is_are_refused(tmp_path: Path, publisher: Publisher) -> None:
    publisher.publish(0, make_model(0) | {"stray.weight": np.zeros(3, np.float32)}).result(10)
    with pytest.raises(LayoutMismatchError, match=r"stray\.weight"):
        subscribe(Engine(), tmp_path).stage()
    halves = Engine()
    halves.workers[1].model.up_proj.tp_rank = 0
    halves.workers[1].rose_weights.refresh()
    with pytest.raises(LayoutMismatchError, match=r"up_proj\.weight .*on no rank"):
        subscribe(halves, tmp_path)


def test_a_store_that_cannot_be_opened_is_an_error_of_its_rank(tmp_path: Path) -> None:
    address = StoreAddress(where=str(tmp_path), key="env:ROSE_NO_SUCH_TOKEN")
    with pytest.raises(RankError, match="ROSE_NO_SUCH_TOKEN"):
        RankSubscriber(Engine(), address, receiver_id="r")
