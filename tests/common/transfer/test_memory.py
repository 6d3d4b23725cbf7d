"""What either end holds besides the snapshot, the staged values and what the store keeps: about three buckets."""

import gc
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from common.transfer import shards
from common.transfer.manifest import UpdateKey
from common.transfer.publisher import Publisher
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Parts
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from tests.common.transfer.models import Weights, blank, small_step

BUCKET_BYTES = 1 << 20
NUM_BUCKETS = 16


class ForgetfulStore(MemoryStore):
    """Keeps no bucket."""

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        if not name.startswith("b"):
            super().put(key, name, parts)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Weights:
    """Sixteen tensors of a bucket each, cut into runs of an eighth of a bucket."""
    monkeypatch.setattr(shards, "BUCKET_BYTES", BUCKET_BYTES)
    rng = np.random.default_rng(0)
    return {f"w{i}": rng.standard_normal((512, BUCKET_BYTES // 2048), np.float32) for i in range(NUM_BUCKETS)}


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def lay_out(*args: object, **kwargs: object) -> shards.WeightLayout:
    return shards.build_layout(*args, **kwargs, min_run_bytes=BUCKET_BYTES // 8, max_run_bytes=BUCKET_BYTES // 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_the_sender_needs_three_buckets_beyond_its_snapshot(model: Weights, traced: None, share: float) -> None:
    publisher = Publisher(ForgetfulStore(), anchor_interval=100, lay_out=lay_out)
    publisher.publish(0, model).result()
    assert len(publisher.layout.buckets) == NUM_BUCKETS
    stepped = small_step(model, 1, share=share)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    publisher.publish(1, stepped).result()
    publisher.close()
    assert tracemalloc.get_traced_memory()[1] - before < 3 * BUCKET_BYTES


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_the_receiver_needs_three_buckets_beyond_what_it_staged(model: Weights, traced: None, share: float) -> None:
    store = MemoryStore()
    publisher = Publisher(store, anchor_interval=100, lay_out=lay_out)
    subscriber = Subscriber(store, NumpyTarget(blank(model)), receiver_id="r")
    publisher.publish(0, model).result()
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    publisher.publish(1, small_step(model, 1, share=share)).result()
    publisher.close()
    del staged
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    staged = subscriber.stage()
    assert staged is not None
    held = sum(run.bits.nbytes + (0 if run.local is None else run.local.nbytes) for run in staged.runs.values())
    assert tracemalloc.get_traced_memory()[1] - before < held + 3 * BUCKET_BYTES
