"""Publisher and subscriber over every store: the replica's weights are the published ones, bit for bit, whatever the path."""

from pathlib import Path

import numpy as np
import pytest

from common.transfer.errors import LayoutMismatchError, VersionGoneError, WrongBaseError
from common.transfer.manifest import UpdateKind
from common.transfer.publisher import Publisher
from common.transfer.shards import build_layout
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from tests.common.transfer.models import Weights, assert_equal_bits, blank, make_model, small_step


def fine_layout(*args: object, **kwargs: object) -> object:
    return build_layout(*args, **kwargs, min_run_bytes=2000)  # type: ignore[arg-type]


class Replica:
    """Arrays, and a subscriber that keeps them at the newest version."""

    def __init__(self, store: Store, model: Weights, name: str = "replica-0", **options: object) -> None:
        self.arrays = blank(model)
        self.subscriber = Subscriber(store, NumpyTarget(self.arrays), receiver_id=name, timeout_s=5.0, **options)  # type: ignore[arg-type]

    def update(self) -> int | None:
        staged = self.subscriber.stage()
        if staged is not None:
            self.subscriber.commit(staged)
        return self.subscriber.version


@pytest.mark.parametrize(("key", "link_gbit_s"), [(None, None), (b"secret", 100.0)])
def test_the_replica_follows_bit_for_bit(store: Store, key: bytes | None, link_gbit_s: float | None) -> None:
    model = make_model()
    publisher = Publisher(store, anchor_interval=3, key=key, link_gbit_s=link_gbit_s, lay_out=fine_layout)  # type: ignore[arg-type]
    replica = Replica(store, model, key=key)
    shares = [0.0, 0.02, 0.001, 0.5, 1.0, 0.0, 0.05]
    for version, share in enumerate(shares):
        model = small_step(model, version, share=share)
        report = publisher.publish(version, model).result(10)
        assert report.base_version == (version - 1 if version else None)
        assert replica.subscriber.poll(1.0) == version
        assert replica.update() == version
        assert_equal_bits(replica.arrays, model)
        assert replica.subscriber.poll() is None
        assert replica.subscriber.stage() is None
    publisher.close()
    replica.subscriber.close()


def test_unchanged_weights_cost_next_to_nothing(store: Store) -> None:
    model = make_model(width=256)
    publisher = Publisher(store)
    replica = Replica(store, model)
    publisher.publish(0, model).result(10)
    replica.update()
    report = publisher.publish(1, {name: array.copy() for name, array in model.items()}).result(10)
    assert report.changed_elements == 0
    assert report.wire_bytes < 100
    assert replica.update() == 1
    assert_equal_bits(replica.arrays, model)


def test_staging_leaves_live_weights_alone_and_both_steps_can_be_repeated(store: Store) -> None:
    models = [make_model()]
    publisher, replica = Publisher(store), Replica(store, models[0])
    publisher.publish(0, models[0]).result(10)
    replica.update()
    models.append(small_step(models[0], 1))
    publisher.publish(1, models[1]).result(10)
    staged = replica.subscriber.stage()
    assert staged is not None
    assert replica.subscriber.stage() is staged
    assert replica.subscriber.version == 0
    assert_equal_bits(replica.arrays, models[0])
    for _ in range(2):
        replica.subscriber.commit(staged)
        assert replica.subscriber.version == 1
        assert_equal_bits(replica.arrays, models[1])
    NumpyTarget(replica.arrays).apply(staged)
    assert_equal_bits(replica.arrays, models[1])


def test_missed_versions_arrive_in_one_commit(store: Store) -> None:
    model = make_model()
    publisher, replica = Publisher(store, anchor_interval=100, lay_out=fine_layout), Replica(store, model)  # type: ignore[arg-type]
    publisher.publish(0, model).result(10)
    replica.update()
    for version in range(1, 5):
        model = small_step(model, version, share=0.3 if version == 3 else 0.01)
        publisher.publish(version, model).result(10)
    staged = replica.subscriber.stage()
    assert staged is not None
    assert (staged.base_version, staged.version) == (0, 4)
    replica.subscriber.commit(staged)
    assert_equal_bits(replica.arrays, model)


def test_a_late_joiner_takes_the_anchor_and_the_deltas_after_it(store: Store) -> None:
    model = make_model()
    publisher = Publisher(store, anchor_interval=4)
    for version in range(7):
        model = small_step(model, version)
        publisher.publish(version, model).result(10)
    publisher.close()
    keys = [(entry.head.version, entry.head.key.kind) for entry in store.catalog().entries]
    assert keys == [(4, UpdateKind.ANCHOR), (5, UpdateKind.DELTA), (6, UpdateKind.DELTA)]
    replica = Replica(store, model)
    staged = replica.subscriber.stage()
    assert staged is not None
    assert staged.base_version is None
    replica.subscriber.commit(staged)
    assert_equal_bits(replica.arrays, model)


def test_whole_tensors_can_wait_in_a_file(store: Store, tmp_path: Path) -> None:
    model = make_model()
    publisher, replica = Publisher(store), Replica(store, model, spool_dir=tmp_path)
    publisher.publish(0, model).result(10)
    model = small_step(model, 1)
    publisher.publish(1, model).result(10)
    assert replica.update() == 1
    assert_equal_bits(replica.arrays, model)


def test_many_changes_over_changes_wait_in_a_file_too(tmp_path: Path) -> None:
    store, model = MemoryStore(), make_model()
    publisher, replica = Publisher(store, anchor_interval=100), Replica(store, model, spool_dir=tmp_path)
    publisher.publish(0, model).result(10)
    replica.update()
    for version, share in enumerate((0.01, 0.6, 0.02, 0.7, 1.0, 0.01), start=1):
        model = small_step(model, version, share=share)
        publisher.publish(version, model).result(10)
    assert replica.update() == 6
    assert_equal_bits(replica.arrays, model)


def test_a_replica_that_starts_from_the_same_checkpoint_fetches_no_weights(store: Store) -> None:
    model = make_model()
    publisher = Publisher(store)
    arrays = {name: array.copy() for name, array in model.items()}
    same = Subscriber(store, NumpyTarget(arrays), receiver_id="same")
    assert same.adopt() is None
    publisher.publish(0, model).result(10)
    other = Replica(store, model, "other")
    assert other.subscriber.adopt() is None
    assert same.adopt() == same.version == 0
    assert same.stage() is None
    model = small_step(model, 1)
    publisher.publish(1, model).result(10)
    staged = same.stage()
    assert staged is not None
    assert staged.base_version == 0
    same.commit(staged)
    assert_equal_bits(arrays, model)


def test_without_deltas_every_version_travels_whole(store: Store) -> None:
    model = make_model()
    publisher, replica = Publisher(store, deltas=False, link_gbit_s=100.0), Replica(store, model)
    for version in range(3):
        model = small_step(model, version)
        report = publisher.publish(version, model).result(10)
        assert report.wire_bytes > report.dense_bytes
        assert replica.update() == version
        assert_equal_bits(replica.arrays, model)


@pytest.mark.parametrize("how", ["told", "same memory"])
@pytest.mark.parametrize("replica_has", ["both, apart", "both, shared", "the embedding", "the head"])
def test_tied_tensors_travel_once_and_update_every_use(how: str, replica_has: str) -> None:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    store, model = MemoryStore(), make_model()
    tied = {head: embedding} if how == "told" else None
    publisher = Publisher(store, tied=tied)
    arrays = blank(model)
    if replica_has == "both, apart":
        arrays[head] = np.zeros_like(arrays[embedding])
    elif replica_has == "both, shared":
        arrays[head] = arrays[embedding]
    elif replica_has == "the head":
        arrays[head] = arrays.pop(embedding)
    subscriber = Subscriber(store, NumpyTarget(arrays), receiver_id="r")
    for version in range(3):
        model = small_step(model, version)
        sent = model if how == "told" else model | {head: model[embedding]}
        report = publisher.publish(version, sent).result(10)
        assert report.num_elements == sum(array.size for array in model.values())
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        for name in {embedding, head} & arrays.keys():
            assert arrays[name].tobytes() == model[embedding].tobytes()


def test_tensors_without_counterpart_are_refused_unless_listed(store: Store) -> None:
    model = make_model()
    Publisher(store).publish(0, model).result(10)
    fewer = {name: array for name, array in model.items() if name != "scale"}
    with pytest.raises(LayoutMismatchError, match="skip_sources"):
        Replica(store, fewer).update()
    assert Replica(store, fewer, skip_sources=["scale"]).update() == 0
    more = model | {"rope.inv_freq": np.zeros(3, np.float32)}
    with pytest.raises(LayoutMismatchError, match="expected_missing"):
        Replica(store, more).update()
    assert Replica(store, more, expected_missing=["rope.inv_freq"]).update() == 0
    other = model | {"scale": np.zeros(2, np.float32)}
    with pytest.raises(LayoutMismatchError, match="scale"):
        Replica(store, other).update()


def test_a_publisher_that_starts_anew_begins_with_an_anchor(store: Store) -> None:
    model = make_model()
    first, replica = Publisher(store), Replica(store, model)
    for version in range(4):
        first.publish(version, small_step(model, version)).result(10)
        replica.update()
    first.close()
    second = Publisher(store)
    with pytest.raises(VersionGoneError):
        replica.subscriber.stage()
    resumed = small_step(model, 77)
    second.publish(2, resumed).result(10)
    assert replica.subscriber.poll() == 2
    assert replica.update() == 2
    assert_equal_bits(replica.arrays, resumed)


def test_an_update_for_another_base_is_refused_at_commit(store: Store) -> None:
    model = make_model()
    publisher, replica = Publisher(store, anchor_interval=100), Replica(store, model)
    publisher.publish(0, model).result(10)
    replica.update()
    publisher.publish(1, small_step(model, 1)).result(10)
    to_1 = replica.subscriber.stage()
    publisher.publish(2, small_step(model, 2)).result(10)
    to_2 = replica.subscriber.stage()
    assert to_1 is not None
    assert to_2 is not None
    replica.subscriber.commit(to_2)
    with pytest.raises(WrongBaseError):
        replica.subscriber.commit(to_1)
    assert_equal_bits(replica.arrays, small_step(model, 2))


def test_versions_must_grow_and_models_must_not_change_their_tensors() -> None:
    model = make_model()
    publisher = Publisher(MemoryStore())
    publisher.publish(3, model).result(10)
    with pytest.raises(ValueError, match="versions must grow"):
        publisher.publish(3, model)
    with pytest.raises(ValueError, match="scale"):
        publisher.publish(4, model | {"scale": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="missing"):
        publisher.publish(4, {name: array for name, array in model.items() if name != "scale"})
    publisher.publish(4, model).result(10)


def test_ties_that_come_apart_are_an_error() -> None:
    model = make_model()
    model["lm_head.weight"] = model["model.embed_tokens.weight"]
    publisher = Publisher(MemoryStore())
    publisher.publish(0, model).result(10)
    apart = small_step(model, 1)
    with pytest.raises(ValueError, match="were tied"):
        publisher.publish(1, apart).result(10)
    assert publisher.publish(2, model).result(10).base_version is None
