"""Ranks fetch what they own, whatever the layout of a replica, and end with slices of the published model, bit for bit."""

import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transfer.bits import DTYPES
from common.transfer.boxes import Box, strided
from common.transfer.errors import ChecksumError, FingerprintMismatchError, LayoutMismatchError, MalformedUpdateError
from common.transfer.fetch import MAX_OVER_READ, ranges_of
from common.transfer.holding import check_coverage
from common.transfer.manifest import RunEntry, UpdateKey, UpdateKind
from common.transfer.publisher import Publisher
from common.transfer.rank_boxes import EMBEDDING, HEAD, ModelShape, Specs, ranks
from common.transfer.rank_target import RankTarget
from common.transfer.shards import build_layout
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from tests.common.transfer.models import Weights, small_step
from tests.common.transfer.ranks import assert_holds_its_slices, target_of

SMALL = ModelShape(num_layers=4, hidden=64, heads=16, kv_heads=8, head_dim=8, feed_forward=128, vocab=256, tied=True)
MAX_MEMBERS = 7
fine_layout = functools.partial(build_layout, min_run_bytes=256)


def random_model(specs: Specs, seed: int) -> Weights:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(DTYPES[dtype]) for name, (shape, dtype) in specs.items()}


class Fleet:
    """The ranks of one replica, each with its own subscriber; of many only every so many-th, since each takes a while."""

    def __init__(self, store: MemoryStore, shape: ModelShape, tensor: int, pipeline: int, key: bytes | None = None) -> None:
        specs = shape.specs()
        everyone = ranks(shape, tensor, pipeline)
        everywhere = {name for rank in everyone for name in rank.names(specs)}
        self.members = everyone[:: -(-len(everyone) // MAX_MEMBERS)]
        self.arrays, self.subscribers = [], []
        for i, rank in enumerate(self.members):
            target, arrays = target_of(rank, specs)
            elsewhere = everywhere - set(arrays)
            self.arrays.append(arrays)
            self.subscribers.append(Subscriber(store, target, receiver_id=f"rank-{i}", skip_sources=elsewhere, key=key))

    def follow(self, model: Weights) -> list[int]:
        """Bring every rank to the newest version, check its bits, and say what it fetched."""
        fetched = []
        for subscriber, arrays in zip(self.subscribers, self.arrays, strict=True):
            staged = subscriber.stage()
            assert staged is not None
            fetched.append(staged.wire_bytes)
            subscriber.commit(staged)
            assert_holds_its_slices(arrays, model)
        return fetched

    def close(self) -> None:
        for subscriber in self.subscribers:
            subscriber.close()


@settings(max_examples=8, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline=st.integers(1, 4),
    tied=st.booleans(),
    keyed=st.booleans(),
    shares=st.lists(st.sampled_from([0.0, 0.01, 0.4, 1.0]), min_size=1, max_size=3),
)
def test_every_rank_holds_its_slices_after_every_version(
    tensor: int, pipeline: int, tied: bool, keyed: bool, shares: list[float]
) -> None:
    shape = ModelShape(num_layers=4, hidden=64, heads=16, kv_heads=8, head_dim=8, feed_forward=128, vocab=256, tied=tied)
    key = b"k" * 16 if keyed else None
    store, model = MemoryStore(), random_model(shape.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING} if tied else None, lay_out=fine_layout, anchor_interval=2, key=key)
    fleet = Fleet(store, shape, tensor, pipeline, key)
    publisher.publish(0, model).result(10)
    fleet.follow(model)
    for version, share in enumerate(shares, start=1):
        model = small_step(model, version, share=share)
        publisher.publish(version, model).result(10)
        fleet.follow(model)
    publisher.close()
    fleet.close()


@pytest.mark.parametrize("vocab", [250, 256])
def test_runs_across_the_border_of_a_box_are_written_where_they_are_held(vocab: int) -> None:
    """Three ranks on a grid of sixteenths: no border of a rank is one of a run."""
    specs: Specs = {"w": ((vocab, 48), "bfloat16"), "o_proj.weight": ((48, vocab), "bfloat16")}
    store, model = MemoryStore(), random_model(specs, 0)
    publisher = Publisher(store, lay_out=fine_layout, anchor_interval=100)
    spans = [(0, 100), (100, 33), (133, vocab - 133)]
    held: list[tuple[dict[str, tuple[Box, np.ndarray]], Subscriber]] = []
    for i, (start, count) in enumerate(spans):
        boxes = {"w": Box((start, 0), (count, 48)), "o_proj.weight": Box((0, start), (48, count))}
        arrays = {name: (box, np.zeros(box.extent, DTYPES["bfloat16"])) for name, box in boxes.items()}
        target = RankTarget(specs, {name: [part] for name, part in arrays.items()})
        held.append((arrays, Subscriber(store, target, receiver_id=f"r{i}")))
    for version, share in enumerate([1.0, 0.02, 0.5, 0.0, 0.9]):
        model = small_step(model, version, share=share)
        publisher.publish(version, model).result(10)
        if version == 2:
            continue  # the next one stages two updates over each other
        for arrays, subscriber in held:
            staged = subscriber.stage()
            assert staged is not None
            subscriber.commit(staged)
            assert_holds_its_slices(arrays, model)
    publisher.close()


def test_a_rank_fetches_its_share_and_hardly_more() -> None:
    store, model = MemoryStore(), random_model(SMALL.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING}, lay_out=fine_layout)
    fleet = Fleet(store, SMALL, 4, 1)
    publisher.publish(0, model).result(10)
    whole = Fleet(store, SMALL, 1, 1)
    (all_bytes,) = whole.follow(model)
    dense_bytes = sum(array.nbytes for array in model.values())
    for rank, fetched in zip(fleet.members, fleet.follow(model), strict=True):
        owned_bytes = sum(2 * box.num_elements for name, (_, box) in rank.boxes(SMALL.specs()).items() if name != HEAD)
        index_bytes = 40 * 16 * 30  # hardly any runs here are large, so indexes weigh more than they do in a real model
        assert fetched <= 1.1 * all_bytes * owned_bytes / dense_bytes + index_bytes
    publisher.close()


def test_a_rank_adopts_weights_that_are_the_anchors_and_no_others() -> None:
    store, model = MemoryStore(), random_model(SMALL.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING}, lay_out=fine_layout)
    publisher.publish(0, model).result(10)
    fleet = Fleet(store, SMALL, 2, 2)
    for subscriber, arrays in zip(fleet.subscribers, fleet.arrays, strict=True):
        assert subscriber.adopt() is None
        for name, (box, array) in arrays.items():
            array[:] = (model[name] if name in model else model[EMBEDDING])[box.slices]
        assert subscriber.adopt() == 0
    model = small_step(model, 1)
    publisher.publish(1, model).result(10)
    fleet.follow(model)
    publisher.close()


def test_drift_on_a_rank_is_found_by_the_next_update_that_touches_it() -> None:
    store, model = MemoryStore(), random_model(SMALL.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING}, lay_out=fine_layout)
    fleet = Fleet(store, SMALL, 2, 1)
    publisher.publish(0, model).result(10)
    fleet.follow(model)
    _, array = fleet.arrays[1]["model.layers.0.self_attn.o_proj.weight"]
    array[:] += 1
    model = small_step(model, 1, share=0.5)
    publisher.publish(1, model).result(10)
    with pytest.raises(FingerprintMismatchError, match="o_proj"):
        fleet.subscribers[1].stage()
    publisher.close()


def test_damage_in_a_range_is_found_and_fetched_again() -> None:
    class Damaging(MemoryStore):
        damage = 0

        def read(self, key: UpdateKey, name: str, **span: object) -> memoryview:  # type: ignore[override]
            content = super().read(key, name, **span)  # type: ignore[arg-type]
            if name.startswith("b") and span.get("start") and self.damage:
                self.damage -= 1
                content = memoryview(bytes(len(content)))
            return content

    store, model = Damaging(), random_model(SMALL.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING}, lay_out=fine_layout)
    publisher.publish(0, model).result(10)
    fleet = Fleet(store, SMALL, 2, 1)
    store.damage = 100
    with pytest.raises(ChecksumError, match="checksum"):
        fleet.subscribers[0].stage()
    store.damage = 1
    fleet.follow(model)
    publisher.close()


def test_a_tensor_that_no_rank_has_is_refused() -> None:
    store, model = MemoryStore(), random_model(SMALL.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING}, lay_out=fine_layout)
    publisher.publish(0, model | {"stray.weight": model["model.norm.weight"].copy()}).result(10)
    for subscriber in Fleet(store, SMALL, 2, 2).subscribers:
        with pytest.raises(LayoutMismatchError, match=r"stray\.weight"):
            subscriber.stage()
    publisher.close()


def test_ranks_that_leave_a_part_out_are_refused() -> None:
    specs: Specs = {"w": ((8, 4), "bfloat16"), "norm": ((4,), "bfloat16")}
    top, bottom = Box((0, 0), (4, 4)), Box((4, 0), (4, 4))
    check_coverage(specs, [{"w": [top], "norm": None}, {"w": [bottom]}])
    check_coverage(specs, [{"w": [top, bottom], "norm": None}, {"w": [bottom]}])
    with pytest.raises(LayoutMismatchError, match="on no rank"):
        check_coverage(specs, [{"w": [top], "norm": None}, {"w": [Box((5, 0), (3, 4))]}])
    with pytest.raises(LayoutMismatchError, match="norm"):
        check_coverage(specs, [{"w": [top, bottom]}])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_positions_within_a_box_are_those_that_numpy_slices(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    start = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extent = tuple(data.draw(st.integers(1, size - first)) for size, first in zip(shape, start, strict=True))
    flat = np.arange(int(np.prod(shape)), dtype=np.uint64)
    held = flat.reshape(shape)[Box(start, extent).slices].reshape(-1)
    here, local = strided(shape, Box(start, extent)).to_local(flat)
    np.testing.assert_array_equal(held[local], flat[here])
    assert len(here) == len(held)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    seed=st.integers(0, 99),
    have=st.integers(0, 500),
)
def test_ranges_hold_every_wanted_run_and_little_else(lengths: list[int], seed: int, have: int) -> None:
    offsets = np.cumsum([100, *lengths])
    entries = [RunEntry(i, int(offsets[i]), length, 0, 0, None) for i, length in enumerate(lengths)]
    wanted = [entry for entry in entries if np.random.default_rng([seed, entry.run]).random() < 0.5]
    ranges = ranges_of(wanted, have=have)
    missing = [entry for entry in wanted if entry.offset + entry.length > have]
    for entry in missing:
        assert any(start <= entry.offset and entry.offset + entry.length <= end for start, end in ranges)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    wanted_bytes = sum(entry.length for entry in missing)
    assert sum(end - start for start, end in ranges) <= (1 + MAX_OVER_READ) * wanted_bytes


def test_an_anchor_that_lacks_a_wanted_run_is_refused() -> None:
    store, model = MemoryStore(), random_model(SMALL.specs(), 0)
    publisher = Publisher(store, tied={HEAD: EMBEDDING}, lay_out=fine_layout)
    publisher.publish(0, model).result(10)
    publisher.publish(1, small_step(model, 1, share=0.001)).result(10)
    publisher.close()

    class Relabelled(MemoryStore):
        """Serves the delta's bucket, which lacks most runs, as the anchor's."""

        def read(self, key: UpdateKey, name: str, **span: object) -> memoryview:  # type: ignore[override]
            wanted = UpdateKey(1, UpdateKind.DELTA) if name.startswith("b") else key
            return store.read(wanted, name, **span)  # type: ignore[arg-type]

        def catalog(self, **waiting: object) -> object:  # type: ignore[override]
            return store.catalog()

        def lease(self, *args: object) -> None:
            pass

    fleet = Fleet(Relabelled(), SMALL, 2, 1)
    with pytest.raises(MalformedUpdateError, match="lacks"):
        fleet.subscribers[0].stage(0)
