"""A learner sharded over any mesh reaches ranks and engines sharded over any other, bit for bit, each fetching its own part."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from common.config import MeshConfig
from common.transfer.boxes import box_of_slices
from common.transfer.holding import Holding, match_names
from common.transfer.ownership import Owners, merged
from common.transfer.publisher import Publisher
from common.transfer.rank_boxes import EMBEDDING, HEAD, ModelShape, Rank, ranks
from common.transfer.shards import TensorLayout, WeightLayout, build_layout
from common.transfer.source import ShardedTensor
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.writers import Writers
from rose_jax.export import named_tensors
from rose_jax.mesh import make_mesh, param_shardings
from rose_jax.models.checkpoint_table import FSDP_AXIS, TENSOR_AXIS
from rose_jax.shards import local_parts, owners_of, source_of
from rose_jax.weight_target import JaxWeightTarget
from tests.common.transfer.models import Weights, small_step
from tests.common.transfer.ranks import assert_holds_its_slices, target_of
from tests.rose_jax.test_weight_target import RecordingEngine, assert_equal_bits, make_params, model_config, perturbed

SHAPE = ModelShape(num_layers=4, hidden=64, heads=16, kv_heads=8, head_dim=8, feed_forward=128, vocab=256, tied=True)
fine_layout = functools.partial(build_layout, min_run_bytes=256)
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
MAX_RANKS = 5
"""Of one replica that are brought up to date in one example; arithmetic covers them all."""


def partition(name: str, shape: tuple[int, ...], *, transposed: bool) -> PartitionSpec:
    """As the learner's: both axes of a matrix cut, vectors everywhere."""
    if len(shape) == 1:
        return PartitionSpec()
    is_row_parallel = name.endswith(("o_proj.weight", "down_proj.weight"))
    axes = (FSDP_AXIS, TENSOR_AXIS) if is_row_parallel != transposed else (TENSOR_AXIS, FSDP_AXIS)
    return PartitionSpec(*axes)


def as_processes(array: jax.Array, name: str, num_processes: int) -> list[ShardedTensor]:
    """What each of several processes would publish if each had an equal share of this process's devices, in order."""
    per_process = jax.device_count() // num_processes
    first: dict = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        first.setdefault(box_of_slices(array.shape, index), device.id // per_process)
    owners: Owners = merged(array.shape, tuple(first.items()), name)
    host = np.asarray(array)
    tensor = ShardedTensor(shape=array.shape, dtype=host.dtype, owners=owners, read=lambda box: host[box.slices])
    return [tensor] * num_processes


def place(model: Weights, mesh: Mesh, *, transposed: bool) -> dict[str, jax.Array]:
    specs = {name: partition(name, array.shape, transposed=transposed) for name, array in model.items()}
    return {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in model.items()}


def publish(publishers: list[Publisher], version: int, arrays: dict[str, jax.Array]) -> None:
    sharded = {name: as_processes(array, name, len(publishers)) for name, array in arrays.items()}
    started = [p.publish(version, {name: of[i] for name, of in sharded.items()}) for i, p in enumerate(publishers)]
    concurrent.futures.wait([publication._done for publication in started], 60)
    for publication in started:
        publication.result(0)


def fetched_dense_bytes(layout: WeightLayout, rank: Rank) -> tuple[int, int]:
    """(dense bytes of the boxes that a rank owns, of the runs it fetches), in matrices: those that are cut for ranks."""
    target, _ = target_of(rank, SHAPE.specs())
    everything = {*SHAPE.specs(), HEAD}
    holding = Holding(layout, match_names(layout, target.specs(), everything, ()), target)
    matrices = {i for i, tensor in enumerate(layout.tensors) if len(tensor.shape) == 2}
    fetched = sum(layout.run_bytes(run) for run in holding.runs if layout.locate(run)[0] in matrices)
    owned: dict[TensorLayout, int] = {}
    for name, (_, box) in rank.boxes(SHAPE.specs()).items():
        if len(box.extent) == 2:
            owned[layout.by_name[name]] = 2 * box.num_elements  # tied names share one tensor
    return sum(owned.values()), fetched


@settings(max_examples=4, deadline=None)
@given(
    mesh=st.sampled_from(MESHES),
    num_processes=st.sampled_from([1, 2, 4, 8]),
    transposed=st.booleans(),
    replica=st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 4)),
    share=st.sampled_from([0.01, 0.3, 1.0]),
)
@example(mesh=(2, 4), num_processes=2, transposed=False, replica=(16, 1), share=0.05)  # two ranks on each key-value head
@example(mesh=(1, 8), num_processes=2, transposed=True, replica=(4, 1), share=0.05)
def test_any_mesh_reaches_any_ranks_bit_for_bit_and_each_fetches_its_own(
    mesh: tuple[int, int], num_processes: int, transposed: bool, replica: tuple[int, int], share: float
) -> None:
    specs = SHAPE.specs()
    rng = np.random.default_rng(0)
    model = {name: rng.standard_normal(shape).astype(jnp.bfloat16) for name, (shape, _) in specs.items()}
    devices = make_mesh(MeshConfig(fsdp=mesh[0], tensor=mesh[1]))
    store = MemoryStore()
    publishers = [
        Publisher(
            store,
            tied={HEAD: EMBEDDING},
            lay_out=fine_layout,
            writers=Writers(writer=i, num_writers=num_processes, lineage="a1", timeout_s=30.0),
        )
        for i in range(num_processes)
    ]
    publish(publishers, 0, place(model, devices, transposed=transposed))
    members = ranks(SHAPE, *replica)
    for rank in members:
        owned, fetched = fetched_dense_bytes(publishers[0].layout, rank)
        assert owned <= fetched <= 1.1 * owned, rank
    everywhere = {name for rank in members for name in rank.names(specs)}
    followers = []
    for i, rank in enumerate(members[:: -(-len(members) // MAX_RANKS)]):
        target, arrays = target_of(rank, specs)
        elsewhere = everywhere - arrays.keys()
        followers.append((Subscriber(store, target, receiver_id=f"r{i}", skip_sources=elsewhere, timeout_s=10.0), arrays))
    for version in range(3):
        if version:
            model = small_step(model, version, share=share)
            publish(publishers, version, place(model, devices, transposed=transposed))
        for subscriber, arrays in followers:
            staged = subscriber.stage()
            assert staged is not None
            subscriber.commit(staged)
            assert_holds_its_slices(arrays, model)
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize(("tensor", "compute_dtype"), [(2, "float32"), (8, "bfloat16")])
def test_a_sharded_engine_follows_and_its_tensors_stay_where_they_were(tensor: int, compute_dtype: str) -> None:
    config = dataclasses.replace(model_config(tied=True), num_heads=8, num_kv_heads=8, vocab_size=48)
    mesh = make_mesh(MeshConfig(fsdp=8 // tensor, tensor=tensor))
    params = make_params(config, 0, compute_dtype)
    shardings = param_shardings(config, params, mesh)
    empty = jax.device_put(jax.tree.map(jnp.zeros_like, params), shardings)
    engine, store = RecordingEngine(), MemoryStore()
    target = JaxWeightTarget(engine, config, empty, weights_dtype="bfloat16")  # type: ignore[arg-type]
    subscriber = Subscriber(store, target, receiver_id="r")
    publisher = Publisher(store, anchor_interval=100)
    published = make_params(config, 1, "bfloat16")
    for version, share in enumerate([1.0, 0.01, 0.9, 0.0, 0.3]):
        published = perturbed(published, version, share)
        sources = {name: source_of(array, name) for name, array in named_tensors(published)}
        publisher.publish(version, sources).result()
        staged = subscriber.stage()
        assert staged is not None
        with jax.transfer_guard_device_to_device("disallow"):
            subscriber.commit(staged)
        live = engine.committed[version]
        assert_equal_bits(live, published, "bfloat16")
        for (name, old), (_, new) in zip(named_tensors(empty), named_tensors(live), strict=True):
            assert new.sharding == old.sharding, name
    publisher.close()


def test_owners_take_a_box_that_several_devices_hold_once_and_from_the_first() -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    array = jax.device_put(jnp.zeros((8, 6)), NamedSharding(mesh, PartitionSpec(TENSOR_AXIS)))
    assert len(local_parts(array)) == 2
    ((box, process),) = owners_of(array, "w")
    assert (box.start, box.extent, process) == ((0, 0), (8, 6), 0)
