"""Several learner processes publish one update together: whole, or withdrawn everywhere with the text of who failed."""

import concurrent.futures
import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transfer.boxes import Box
from common.transfer.errors import FarSideError, LayoutMismatchError, TransferTimeoutError
from common.transfer.layout_wire import parse_layout
from common.transfer.manifest import UpdateKey
from common.transfer.ownership import Owners, cut_units, merged
from common.transfer.publication import PublishReport
from common.transfer.publisher import Publisher
from common.transfer.shards import build_layout
from common.transfer.source import ShardedTensor, parts_of
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Parts, Store
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from common.transfer.writers import Writers
from tests.common.transfer.models import Weights, assert_equal_bits, blank, make_model, small_step

fine_layout = functools.partial(build_layout, min_run_bytes=500)


def owners_of(shape: tuple[int, ...], cuts: tuple[int, ...], writers: Callable[[tuple[int, ...]], int]) -> Owners:
    """Equal parts of a tensor, `cuts` of them along each axis, each with the writer of its place."""
    extent = tuple(size // n for size, n in zip(shape, cuts, strict=True))
    places = itertools.product(*(range(n) for n in cuts))
    return tuple((Box(tuple(map(int.__mul__, place, extent)), extent), writers(place)) for place in places)


def shard(model: Weights, num_writers: int, *, axis_of: Callable[[str], int]) -> dict[str, ShardedTensor]:
    """Each tensor cut along one axis into a part for every writer; what does not divide is the first writer's."""
    sharded = {}
    for name, array in model.items():
        axis = axis_of(name)
        divides = array.ndim > axis and array.shape[axis] and array.shape[axis] % num_writers == 0
        cuts = tuple(num_writers if divides and i == axis else 1 for i in range(array.ndim))
        owners = owners_of(array.shape, cuts, sum)
        sharded[name] = ShardedTensor(
            shape=array.shape, dtype=array.dtype, owners=owners, read=lambda box, whole=array: whole[box.slices]
        )
    return sharded


def last_axis(name: str) -> int:
    return 1 if "embed" in name or "q_proj" in name else 0


class Learner:
    """A publisher for each of several processes, which here are threads."""

    def __init__(self, stores: list[Store], *, timeout_s: float = 10.0, **options: object) -> None:
        num = len(stores)
        team = [Writers(writer=i, num_writers=num, lineage="a1", timeout_s=timeout_s) for i in range(num)]
        self.publishers = [
            Publisher(store, writers=writers, lay_out=fine_layout, **options)  # type: ignore[arg-type]
            for store, writers in zip(stores, team, strict=True)
        ]

    def publish(self, version: int, weights: list[dict[str, ShardedTensor]]) -> list[PublishReport | BaseException]:
        """What became of a version on each process."""
        started = [p.publish(version, mine) for p, mine in zip(self.publishers, weights, strict=True)]
        ends = [publication._done for publication in started]
        concurrent.futures.wait(ends, 60)
        return [end.exception() or end.result() for end in ends]

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


@pytest.mark.parametrize("key", [None, b"k" * 16])
def test_replicas_follow_a_learner_of_three_processes(store: Store, key: bytes | None) -> None:
    model = make_model()
    learner = Learner([store] * 3, anchor_interval=2, key=key)
    arrays = blank(model)
    subscriber = Subscriber(store, NumpyTarget(arrays), receiver_id="r", key=key, timeout_s=10.0)
    for version, share in enumerate([1.0, 0.02, 0.5, 0.0, 0.001]):
        model = small_step(model, version, share=share)
        reports = learner.publish(version, [shard(model, 3, axis_of=last_axis)] * 3)
        assert [r.base_version for r in reports if isinstance(r, PublishReport)] == [version - 1 if version else None] * 3
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        assert_equal_bits(arrays, model)
    learner.close()
    late = blank(model)
    fresh = Subscriber(store, NumpyTarget(late), receiver_id="late", key=key, timeout_s=10.0)
    staged = fresh.stage()
    assert staged is not None
    assert staged.base_version is None
    fresh.commit(staged)
    assert_equal_bits(late, model)


class HookedStore:
    """Passes everything on to a store that processes share, but first calls `before_put`."""

    def __init__(self, shared: MemoryStore) -> None:
        self._shared = shared
        self.before_put: Callable[[UpdateKey, str], None] = lambda key, name: None

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        self.before_put(key, name)
        self._shared.put(key, name, parts)

    def __getattr__(self, name: str) -> object:
        return getattr(self._shared, name)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_process_that_fails_withdraws_the_update_everywhere_and_the_next_version_is_whole(failing: int) -> None:
    shared, model = MemoryStore(), make_model()
    stores = [HookedStore(shared) for _ in range(3)]
    learner = Learner(stores)  # type: ignore[arg-type]
    arrays = blank(model)
    subscriber = Subscriber(shared, NumpyTarget(arrays), receiver_id="r", timeout_s=10.0)
    learner.publish(0, [shard(model, 3, axis_of=last_axis)] * 3)

    def disk_full(key: UpdateKey, name: str) -> None:
        if key.version == 1 and name.startswith("b"):
            raise OSError(f"no space left on learner-{failing}")

    stores[failing].before_put = disk_full
    ends = learner.publish(1, [shard(small_step(model, 1), 3, axis_of=last_axis)] * 3)
    assert [type(end) for end in ends] == [OSError if i == failing else FarSideError for i in range(3)]
    assert all(f"no space left on learner-{failing}" in str(end) for end in ends)
    model = small_step(model, 2)
    reports = learner.publish(2, [shard(model, 3, axis_of=last_axis)] * 3)
    assert [report.base_version for report in reports if isinstance(report, PublishReport)] == [None] * 3
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    assert_equal_bits(arrays, model)
    learner.close()


def test_a_process_that_falls_silent_is_a_timeout_and_the_text_names_it() -> None:
    shared, model = MemoryStore(), make_model()
    learner = Learner([shared] * 2, timeout_s=0.3)
    weights = shard(model, 2, axis_of=last_axis)
    (first, _) = learner.publishers
    publication = first.publish(0, weights)
    with pytest.raises(TransferTimeoutError, match="p00001"):
        publication.result(10)
    late = learner.publishers[1].publish(0, weights)
    with pytest.raises(FarSideError, match="p00001"):
        late.result(10)
    learner.close()


def test_processes_that_shard_differently_withdraw_the_update() -> None:
    shared, model = MemoryStore(), make_model()
    learner = Learner([shared] * 2, timeout_s=2.0)
    ends = learner.publish(0, [shard(model, 2, axis_of=axis) for axis in (last_axis, lambda name: 0)])
    assert isinstance(ends[1], LayoutMismatchError)
    assert isinstance(ends[0], FarSideError)
    assert "lays the model out otherwise" in str(ends[0])
    learner.close()


def test_a_learner_that_was_sharded_anew_goes_on_from_an_anchor() -> None:
    shared, model = MemoryStore(), make_model()
    learner, arrays = Learner([shared] * 2), blank(model)
    subscriber = Subscriber(shared, NumpyTarget(arrays), receiver_id="r", timeout_s=10.0)
    axes = [last_axis, last_axis, lambda name: 0, lambda name: 0]
    for version, axis in enumerate(axes):
        model = small_step(model, version)
        reports = learner.publish(version, [shard(model, 2, axis_of=axis)] * 2)
        assert [r.base_version for r in reports if isinstance(r, PublishReport)] == [None if version in (0, 2) else version - 1] * 2
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        assert_equal_bits(arrays, model)
    learner.close()


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.sampled_from([1, 4, 6, 24, 48]), min_size=1, max_size=3),
    cuts=st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 3),
    name=st.sampled_from(["up_proj.weight", "down_proj.weight"]),
    seed=st.integers(0, 99),
)
def test_every_run_lies_in_one_part_of_its_writer(shape: list[int], cuts: tuple[int, ...], name: str, seed: int) -> None:
    size = tuple(shape)
    parts = tuple(n if whole % n == 0 else 1 for whole, n in zip(size, cuts, strict=False))
    rng = np.random.default_rng(seed)
    owners = merged(size, owners_of(size, parts, lambda place: int(rng.integers(3))), name)
    layout = build_layout({name: (size, "int8")}, min_run_bytes=8, max_run_bytes=200, owners={name: owners})
    assert parse_layout(layout.json_bytes) == layout
    tensor = layout.tensors[0]
    seen = np.zeros(size, int)
    for run_idx in range(tensor.num_runs):
        writer = tensor.writers[run_idx] if tensor.writers else 0
        for box in tensor.run(run_idx):
            seen[box.slices] += 1
        (part,) = (p for p in parts_of(tensor, owners, writer) if all(p.box.intersection(b) == b for b in tensor.run(run_idx)))
        local = part.local.run(part.local_run(run_idx))
        assert local == tuple(box.relative_to(part.box) for box in tensor.run(run_idx))
    assert (seen == 1).all()
    assert sorted(run for bucket in layout.buckets for run in bucket.runs) == list(range(layout.num_runs))


def test_boxes_that_overlap_or_leave_something_out_are_refused() -> None:
    with pytest.raises(ValueError, match="two processes"):
        cut_units((8,), [(Box((0,), (5,)), 0), (Box((4,), (4,)), 1)], "w")
    with pytest.raises(ValueError, match="leave 1 of 3 parts out"):
        cut_units((8,), [(Box((0,), (3,)), 0), (Box((4,), (4,)), 1)], "w")


def test_one_writer_owning_all_changes_nothing_about_the_layout() -> None:
    specs = {"w": ((64, 48), "bfloat16"), "down_proj.weight": ((48, 64), "bfloat16")}
    owners = {name: [(Box((0, 0), shape), 0)] for name, (shape, _) in specs.items()}
    assert build_layout(specs, owners=owners) == build_layout(specs)
