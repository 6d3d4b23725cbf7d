"""The mesh and where weights lie on it, in one process and in two."""

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from common.config import MeshConfig
from rose_jax.export import load_checkpoint, save_checkpoint
from rose_jax.mesh import constrain, make_mesh, param_shardings, place, tensor_shardings
from rose_jax.models.qwen3 import Qwen3Config, abstract_model, create_model

CONFIG = Qwen3Config(
    vocab_size=96,
    hidden_size=64,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=96,
    tie_word_embeddings=False,
)
ATTENTION = ("layers", 0, "attention")


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 1), (1, 8), (2, 4), (8, 1), (2, 2)])
def test_a_mesh_has_auto_axes_and_the_devices_asked_for(fsdp: int, tensor: int) -> None:
    mesh = make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor))
    assert dict(mesh.shape) == {"fsdp": fsdp, "tensor": tensor}
    assert mesh.axis_types == (AxisType.Auto, AxisType.Auto)
    assert len(set(mesh.devices.flat)) == fsdp * tensor


def test_too_few_devices_are_named_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"mesh\.fsdp=4 x mesh\.tensor=4 needs 16 devices, jax sees 8; .*device_count=16"):
        make_mesh(MeshConfig(fsdp=4, tensor=4))


def test_several_processes_must_use_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match=r"needs 4 devices, jax sees 8 in 2 processes; .* all devices"):
        make_mesh(MeshConfig(fsdp=2, tensor=2))


def test_column_and_row_parallel_weights_are_cut_both_ways() -> None:
    shardings = tensor_shardings(CONFIG, make_mesh(MeshConfig(fsdp=2, tensor=4)))
    column, row = PartitionSpec("tensor", "fsdp"), PartitionSpec("fsdp", "tensor")
    for path in (("embed_tokens",), ("lm_head",), (*ATTENTION, "q_proj"), (*ATTENTION, "k_proj"), ("layers", 0, "mlp", "up_proj")):
        assert shardings[path].spec == column, path
    for path in ((*ATTENTION, "o_proj"), ("layers", 0, "mlp", "down_proj")):
        assert shardings[path].spec == row, path
    assert shardings["final_norm",].is_fully_replicated


@pytest.mark.parametrize(
    ("change", "path", "spec"),
    [
        # 4 heads x 16 rows divide by 8, but only through the middle of a head.
        ({}, (*ATTENTION, "k_proj"), PartitionSpec(None, "fsdp")),
        ({}, (*ATTENTION, "q_proj"), PartitionSpec("tensor", "fsdp")),
        ({"num_heads": 12}, (*ATTENTION, "o_proj"), PartitionSpec("fsdp", None)),
        ({"vocab_size": 97}, ("embed_tokens",), PartitionSpec(None, "fsdp")),
        ({"intermediate_size": 100}, ("layers", 0, "mlp", "gate_proj"), PartitionSpec(None, "fsdp")),
    ],
)
def test_an_axis_that_does_not_divide_a_tensor_replicates_it(change: dict, path: tuple, spec: PartitionSpec) -> None:
    config = dataclasses.replace(CONFIG, **change)
    assert tensor_shardings(config, make_mesh(MeshConfig(fsdp=1, tensor=8)))[path].spec == spec


def test_every_parameter_gets_a_sharding_that_it_divides_by() -> None:
    odd = dataclasses.replace(CONFIG, vocab_size=97, hidden_size=50, num_heads=3, num_kv_heads=3, intermediate_size=90)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    params = nnx.state(abstract_model(odd))
    shardings = jax.tree.leaves(param_shardings(odd, params, mesh))
    for leaf, sharding in zip(jax.tree.leaves(params), shardings, strict=True):
        sharding.shard_shape(leaf.shape)  # raises where an axis does not divide


def test_place_puts_each_row_on_the_devices_of_its_shard() -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    batch = np.arange(8 * 3).reshape(8, 3)
    placed = place(batch, NamedSharding(mesh, PartitionSpec("fsdp")))
    np.testing.assert_array_equal(placed, batch)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3)}


def test_constrain_cuts_what_divides_and_leaves_the_rest() -> None:
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))

    def layout(*shape: int) -> PartitionSpec:
        return jax.jit(lambda x: constrain(x, "fsdp", None, "tensor"))(jnp.zeros(shape)).sharding.spec

    with jax.set_mesh(mesh):
        assert layout(8, 3, 6) == PartitionSpec("fsdp", None, "tensor")
        assert layout(3, 3, 6) == PartitionSpec(None, None, "tensor")
        assert layout(8, 3, 5) == PartitionSpec("fsdp")
    x = jnp.zeros((8, 3, 6))
    assert constrain(x, "fsdp", None, "tensor") is x


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_two_processes_load_compute_and_save_what_one_does(tmp_path: Path) -> None:
    params = nnx.state(create_model(CONFIG, seed=0))
    save_checkpoint(tmp_path / "before", params, CONFIG, dtype="float32")
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.rose_jax.mesh_process", str(tmp_path), str(process_id), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process_id in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    _, doubled = load_checkpoint(tmp_path / "after")
    jax.tree.map(lambda before, after: np.testing.assert_array_equal(2 * before, after), params, doubled)
    np.testing.assert_allclose(
        np.load(tmp_path / "logprobs.npy"), np.load(tmp_path / "logprobs_one_process.npy"), atol=1e-5, rtol=0
    )
