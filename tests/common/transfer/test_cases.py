"""Faults that users of similar systems reported, and what must happen instead."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from common.clock import FakeClock
from common.transfer.errors import FarSideError, FingerprintMismatchError, TransferTimeoutError
from common.transfer.manifest import UpdateKey, UpdateKind
from common.transfer.publisher import Publisher
from common.transfer.staging import StagedUpdate
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import RECEIVER_TTL_S, Parts, Store, UpdateState
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from tests.common.transfer.models import Weights, assert_equal_bits, blank, make_model, small_step


class HookedStore(MemoryStore):
    """A MemoryStore that calls `before_put` and `before_read` first, which may raise or do things in between."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.before_put: Callable[[UpdateKey, str], None] = lambda key, name: None
        self.before_read: Callable[[UpdateKey, str], None] = lambda key, name: None

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        self.before_put(key, name)
        super().put(key, name, parts)

    def read(self, key: UpdateKey, name: str, **kwargs: object) -> memoryview:  # type: ignore[override]
        self.before_read(key, name)
        return super().read(key, name, **kwargs)  # type: ignore[arg-type]


class FailingTarget(NumpyTarget):
    """Fails while it writes the second half of an update, as often as told."""

    failures_left = 0

    def apply(self, update: StagedUpdate) -> None:
        self._writes_left = len(update.runs) // 2 if self.failures_left else None
        super().apply(update)

    def _write(self, run: object, bits: np.ndarray, values: np.ndarray) -> None:  # type: ignore[override]
        if self._writes_left is not None:
            self._writes_left -= 1
            if self._writes_left == -1:
                self.failures_left -= 1
                raise MemoryError("device out of memory")
        super()._write(run, bits, values)  # type: ignore[arg-type]


def follow(subscriber: Subscriber) -> int | None:
    staged = subscriber.stage()
    if staged is not None:
        subscriber.commit(staged)
    return subscriber.version


def replica_of(store: Store, model: Weights, name: str = "r", timeout_s: float = 5.0) -> tuple[Weights, Subscriber]:
    arrays = blank(model)
    return arrays, Subscriber(store, NumpyTarget(arrays), receiver_id=name, timeout_s=timeout_s)


def test_case_1_a_failing_sender_is_told_with_its_own_words_and_the_next_version_works() -> None:
    store, model = HookedStore(), make_model()
    publisher = Publisher(store)
    arrays, subscriber = replica_of(store, model)
    publisher.publish(0, model).result(10)
    assert follow(subscriber) == 0

    def disk_full(key: UpdateKey, name: str) -> None:
        if key.version == 1:
            subscriber_waits.wait(5)
            raise OSError("no space left on learner-3")

    store.before_put, subscriber_waits = disk_full, threading.Event()
    store.before_read = lambda key, name: subscriber_waits.set()
    publication = publisher.publish(1, small_step(model, 1))
    while subscriber.poll(5.0) != 1:
        pass
    with pytest.raises(FarSideError, match="no space left on learner-3"):
        subscriber.stage()
    with pytest.raises(OSError, match="no space left"):
        publication.result(10)
    assert_equal_bits(arrays, model)
    assert subscriber.stage() is None
    model = small_step(model, 2)
    assert publisher.publish(2, model).result(10).base_version is None
    assert follow(subscriber) == 2
    assert_equal_bits(arrays, model)


def test_case_1_a_sender_that_dies_is_a_timeout_and_older_versions_can_still_be_had() -> None:
    store, model = HookedStore(), make_model()
    publisher = Publisher(store)
    publisher.publish(0, model).result(10)
    dead = threading.Event()

    def die(key: UpdateKey, name: str) -> None:
        if key.version == 1:
            dead.wait(20)
            raise SystemError("the end")

    store.before_put = die
    publisher.publish(1, small_step(model, 1))
    arrays, late = replica_of(store, model, timeout_s=0.2)
    while store.catalog().find(UpdateKey(1, UpdateKind.DELTA)) is None:
        time.sleep(0.01)
    assert late.poll(5.0) == 1
    started_s = time.monotonic()
    with pytest.raises(TransferTimeoutError, match="v1/delta"):
        late.stage()
    assert time.monotonic() - started_s < 10
    assert follow(late) == 0
    assert_equal_bits(arrays, model)
    dead.set()
    publisher.close()


def test_case_2_a_receiver_whose_commit_failed_is_sent_what_it_lacks() -> None:
    store, model = MemoryStore(), make_model()
    publisher = Publisher(store, anchor_interval=100)
    good_arrays, good = replica_of(store, model, "good")
    bad_arrays = blank(model)
    target = FailingTarget(bad_arrays)
    bad = Subscriber(store, target, receiver_id="bad")
    publisher.publish(0, model).result(10)
    assert follow(good) == follow(bad) == 0
    models = [model]
    for version in (1, 2):
        models.append(small_step(models[-1], version))
        publisher.publish(version, models[-1]).result(10)
        assert follow(good) == version
        target.failures_left = 1
        staged = bad.stage()
        assert staged is not None
        with pytest.raises(MemoryError, match="device out of memory"):
            bad.commit(staged)
        assert bad.version == 0
        assert_equal_bits(bad_arrays, models[0])
        assert store.confirmations()["bad"].version == 0
    bad.commit(staged)
    assert bad.version == 2
    assert_equal_bits(bad_arrays, models[2])
    assert_equal_bits(good_arrays, models[2])


def test_case_2_weights_that_drifted_are_found_out_and_replaced() -> None:
    store, model = MemoryStore(), make_model()
    publisher = Publisher(store, anchor_interval=100)
    arrays, subscriber = replica_of(store, model)
    publisher.publish(0, model).result(10)
    assert follow(subscriber) == 0
    name = "model.layers.0.self_attn.q_proj.weight"
    new = small_step(model, 1, share=0.5)
    first = np.flatnonzero(model[name].view(np.uint16) != new[name].view(np.uint16))[0]
    arrays[name].view(np.uint16).reshape(-1)[first] ^= 0x4000
    drifted = {n: a.copy() for n, a in arrays.items()}
    publisher.publish(1, new).result(10)
    with pytest.raises(FingerprintMismatchError, match=name):
        subscriber.stage()
    assert subscriber.version == 0
    assert_equal_bits(arrays, drifted)
    staged = subscriber.stage()
    assert staged is not None
    assert staged.base_version is None
    subscriber.commit(staged)
    assert subscriber.version == 1
    assert_equal_bits(arrays, new)


def test_case_3_a_gap_in_the_chain_leads_to_a_full_version() -> None:
    clock, model = FakeClock(), make_model()
    store = MemoryStore(clock)
    publisher = Publisher(store, anchor_interval=3)
    arrays, subscriber = replica_of(store, model)
    publisher.publish(0, model).result(10)
    assert follow(subscriber) == 0
    clock.advance(RECEIVER_TTL_S + 1)
    for version in range(1, 5):
        model = small_step(model, version)
        publisher.publish(version, model).result(10)
    publisher.close()
    assert store.catalog().find(UpdateKey(1, UpdateKind.DELTA)) is None
    staged = subscriber.stage()
    assert staged is not None
    assert (staged.base_version, staged.version) == (None, 4)
    subscriber.commit(staged)
    assert_equal_bits(arrays, model)


def test_case_4_logits_of_a_tied_head_follow() -> None:
    store, model = MemoryStore(), {"embed": make_model()["model.embed_tokens.weight"].astype(np.float32)}
    publisher = Publisher(store, tied={"lm_head": "embed"})
    arrays = {"embed": np.zeros_like(model["embed"]), "lm_head": np.zeros_like(model["embed"])}
    subscriber = Subscriber(store, NumpyTarget(arrays), receiver_id="r")
    tokens = np.array([3, 1, 4])
    for version in range(3):
        model = {"embed": small_step(model, version, share=0.3)["embed"]}
        publisher.publish(version, model).result(10)
        follow(subscriber)
        logits = arrays["embed"][tokens] @ arrays["lm_head"].T
        np.testing.assert_array_equal(logits, model["embed"][tokens] @ model["embed"].T)


def test_case_6_scratch_arrays_are_not_touched() -> None:
    store, model = MemoryStore(), make_model()
    scratch = np.full(1000, np.nan, np.float32)
    arrays = blank(model) | {"kv_scratch": scratch}
    before = scratch.tobytes()
    subscriber = Subscriber(store, NumpyTarget(arrays), receiver_id="r", expected_missing=["kv_scratch"])
    publisher = Publisher(store)
    for version in range(3):
        model = small_step(model, version, share=0.5)
        publisher.publish(version, model).result(10)
        follow(subscriber)
    assert_equal_bits(arrays, model)
    assert scratch.tobytes() == before


def test_case_7_every_transport_records_the_version(store: Store) -> None:
    model = make_model(width=32)
    publisher = Publisher(store)
    _, subscriber = replica_of(store, model)
    for version in (2, 5, 9):
        model = small_step(model, version)
        assert publisher.publish(version, model).result(10).version == version
        assert follow(subscriber) == version
        assert store.confirmations()["r"].version == version


def test_case_8_dense_changes_are_never_larger_than_the_weights() -> None:
    store = MemoryStore()
    rng = np.random.default_rng(0)

    def noise() -> Weights:
        return {name: rng.integers(0, 1 << 32, (600, 500), dtype=np.uint32).view(np.float32) for name in ("few", "half", "all")}

    model = noise()
    publisher = Publisher(store)
    arrays, subscriber = replica_of(store, model)
    publisher.publish(0, model).result(10)
    follow(subscriber)
    for version, (half, every) in enumerate([(0.5, 1.0), (1.0, 1.0), (0.4, 0.7)], start=1):
        new = noise()
        for name, share in (("few", 0.001), ("half", half), ("all", every)):
            kept = rng.random((600, 500)) >= share
            new[name] = np.where(kept, model[name].view(np.uint32), new[name].view(np.uint32)).view(np.float32)
        model = new
        report = publisher.publish(version, model).result(10)
        dense_of_changed = model["few"].nbytes * (0.0015 + half + every)
        assert report.wire_bytes < min(1.08 * dense_of_changed, 1.001 * report.dense_bytes)
        follow(subscriber)
        assert_equal_bits(arrays, model)


def test_case_19_a_version_is_kept_while_it_is_fetched_and_given_up_after() -> None:
    store, model = HookedStore(), make_model()
    publisher = Publisher(store, anchor_interval=2)
    arrays, subscriber = replica_of(store, model)
    publisher.publish(0, model).result(10)
    old_model = model
    in_reading = threading.Event()

    def publish_meanwhile(key: UpdateKey, name: str) -> None:
        nonlocal model
        if not in_reading.is_set():
            in_reading.set()
            for version in range(1, 8):
                model = small_step(model, version)
                publisher.publish(version, model).result(10)
            publisher.close()

    store.before_read = publish_meanwhile
    staged = subscriber.stage()
    assert staged is not None
    assert staged.version == 0
    kept = store.catalog().find(UpdateKey(0, UpdateKind.ANCHOR))
    assert kept is not None
    assert kept.state is UpdateState.SEALED
    subscriber.commit(staged)
    assert_equal_bits(arrays, old_model)
    while not store.remove(UpdateKey(0, UpdateKind.ANCHOR)):  # given up in the background
        time.sleep(0.01)
    assert follow(subscriber) == 7
    assert_equal_bits(arrays, model)
