"""What travels through the transfer layer into a JAX engine equals what was published, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from common.transfer.publisher import Publisher
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from rose_jax.export import named_tensors
from rose_jax.kernels.sparse import (
    MIN_PADDED,
    padded_length,
    read_elements,
    read_elements_reference,
    write_elements,
    write_elements_reference,
)
from rose_jax.models.qwen3 import cast_weights, create_model
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.weight_target import JaxWeightTarget

TINY = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 32,
    "intermediate_size": 48,
}


class RecordingEngine:
    """Only what a target needs of an engine; refuses the versions it is told to."""

    def __init__(self) -> None:
        self.committed: dict[int, nnx.State] = {}
        self.refuses: set[int] = set()

    def commit(self, weights: nnx.State, *, version: int) -> None:
        if version in self.refuses:
            raise ValueError(f"version {version} does not fit")
        self.committed[version] = weights


def model_config(*, tied: bool) -> Qwen3Config:
    return Qwen3Config(**TINY, tie_word_embeddings=tied)


def make_params(config: Qwen3Config, seed: int, dtype: str) -> nnx.State:
    params = nnx.state(create_model(config, seed=seed))
    return cast_weights(params, weights_dtype=dtype, compute_dtype=dtype)


def perturbed(params: nnx.State, seed: int, share: float) -> nnx.State:
    rng = np.random.default_rng(seed)

    def change(leaf: jax.Array) -> jax.Array:
        host = np.array(leaf)
        changed = rng.random(host.shape) < share
        host[changed] = (host[changed].astype(np.float32) * 1.5 + 0.25).astype(host.dtype)
        return jnp.asarray(host)

    return jax.tree.map(change, params)


def publish(publisher: Publisher, version: int, params: nnx.State) -> None:
    publisher.publish(version, {name: np.asarray(tensor) for name, tensor in named_tensors(params)}).result()


def make_target(config: Qwen3Config, weights_dtype: str, compute_dtype: str) -> tuple[RecordingEngine, JaxWeightTarget]:
    engine = RecordingEngine()
    empty = jax.tree.map(jnp.zeros_like, make_params(config, 0, compute_dtype))
    return engine, JaxWeightTarget(engine, config, empty, weights_dtype=weights_dtype)  # type: ignore[arg-type]


def assert_equal_bits(live: nnx.State, published: nnx.State, weights_dtype: str) -> None:
    wanted = dict(named_tensors(published))
    for name, tensor in named_tensors(live):
        assert np.asarray(tensor.astype(weights_dtype)).tobytes() == np.asarray(wanted[name]).tobytes(), name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("weights_dtype", "compute_dtype"), [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_every_version_equals_the_published_one_bit_for_bit(tied: bool, weights_dtype: str, compute_dtype: str) -> None:
    config = model_config(tied=tied)
    store = MemoryStore()
    publisher = Publisher(store, anchor_interval=3)
    engine, target = make_target(config, weights_dtype, compute_dtype)
    subscriber = Subscriber(store, target, receiver_id="replica")
    params = make_params(config, 1, weights_dtype)
    for version, share in enumerate([1.0, 0.01, 0.9, 0.0, 0.3]):
        params = perturbed(params, version, share)
        publish(publisher, version, params)
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
        assert_equal_bits(engine.committed[version], params, weights_dtype)
        for name, tensor in named_tensors(params):
            assert target.published(name).tobytes() == np.asarray(tensor).tobytes()
    publisher.close()


def test_a_version_that_the_engine_refuses_leaves_the_old_one_whole_and_the_next_arrives() -> None:
    config = model_config(tied=True)
    store = MemoryStore()
    publisher = Publisher(store)
    engine, target = make_target(config, "bfloat16", "float32")
    subscriber = Subscriber(store, target, receiver_id="replica")
    versions = [make_params(config, 1, "bfloat16")]
    versions += [perturbed(versions[0], 1, 0.1)]
    versions += [perturbed(versions[1], 2, 0.1)]
    publish(publisher, 0, versions[0])
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    engine.refuses = {1}
    publish(publisher, 1, versions[1])
    staged = subscriber.stage()
    assert staged is not None
    with pytest.raises(ValueError, match="version 1 does not fit"):
        subscriber.commit(staged)
    assert subscriber.version == 0
    for name, tensor in named_tensors(versions[0]):
        assert target.published(name).tobytes() == np.asarray(tensor).tobytes()
    publish(publisher, 2, versions[2])
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    assert_equal_bits(engine.committed[2], versions[2], "bfloat16")
    publisher.close()


def test_the_version_staged_before_stays_valid_while_a_new_one_is_applied() -> None:
    config = model_config(tied=True)
    store = MemoryStore()
    publisher = Publisher(store)
    engine, target = make_target(config, "bfloat16", "float32")
    subscriber = Subscriber(store, target, receiver_id="replica")
    first = make_params(config, 1, "bfloat16")
    for version, params in enumerate([first, perturbed(first, 1, 0.2)]):
        publish(publisher, version, params)
        staged = subscriber.stage()
        assert staged is not None
        subscriber.commit(staged)
    assert_equal_bits(engine.committed[0], first, "bfloat16")
    publisher.close()


@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 4, 5), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sparse_reads_and_writes_equal_their_references(shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(len(shape))
    size = int(np.prod(shape))
    tensor = jnp.asarray(rng.standard_normal(shape), dtype)
    positions = np.sort(rng.permutation(size)[: max(1, size // 2)]).astype(np.uint64)
    values = rng.standard_normal(len(positions)).astype(jnp.dtype(dtype))
    written = write_elements(tensor, positions, values)
    assert np.asarray(written).tobytes() == np.asarray(write_elements_reference(tensor, positions, values)).tobytes()
    read = read_elements(tensor, positions, dtype)
    assert read.tobytes() == read_elements_reference(tensor, positions, dtype).tobytes()


def test_no_positions_read_and_write_nothing() -> None:
    tensor = jnp.arange(6.0).reshape(2, 3)
    none = np.zeros(0, np.uint64)
    assert write_elements(tensor, none, np.zeros(0, np.float32)).tolist() == tensor.tolist()
    assert read_elements(tensor, none, "float32").size == 0


@pytest.mark.parametrize(("num_elements", "length"), [(0, MIN_PADDED), (MIN_PADDED, MIN_PADDED), (MIN_PADDED + 1, 4 * MIN_PADDED)])
def test_lists_are_padded_to_few_lengths(num_elements: int, length: int) -> None:
    assert padded_length(num_elements) == length
