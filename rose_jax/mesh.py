"""The device mesh of a learner, and where parameters and batches lie on it.

Two axes: "fsdp" cuts batches and, for memory, every weight; "tensor" cuts heads, feed-forward and vocabulary. Axes are Auto: the
compiler places what is in between, guided by `constrain`. The same code runs in one process and under jax.distributed, where the
mesh spans all processes and each of them holds the whole host batch. Nothing here moves a weight through one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from common.config import MeshConfig
from rose_jax.models.checkpoint_table import FSDP_AXIS, TENSOR_AXIS, Path, tensor_entries
from rose_jax.models.qwen3_config import Qwen3Config


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A (fsdp, tensor) mesh over the first fsdp x tensor devices; over all of them when there are several processes.

    Raises:
        ValueError: there are too few devices, or (several processes) devices that would be left out.
    """
    available = list(jax.devices() if devices is None else devices)
    needed = config.fsdp * config.tensor
    product = f"mesh.fsdp={config.fsdp} x mesh.tensor={config.tensor} needs {needed} devices, jax sees {len(available)}"
    if needed > len(available):
        raise ValueError(
            f"{product}; lower one of them (on CPU, XLA_FLAGS=--xla_force_host_platform_device_count={needed} makes fake devices)"
        )
    if jax.process_count() > 1 and needed != len(available):
        raise ValueError(f"{product} in {jax.process_count()} processes; a run over several processes must use all devices")
    return jax.make_mesh(
        (config.fsdp, config.tensor), (FSDP_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto,) * 2, devices=available[:needed]
    )


def tensor_shardings(config: Qwen3Config, mesh: Mesh) -> dict[Path, NamedSharding]:
    """Parameter path -> sharding. A tensor that an axis does not divide into whole units is replicated along that axis."""
    return {entry.path: NamedSharding(mesh, entry.partition(mesh.shape)) for entry in tensor_entries(config)}


def param_shardings(config: Qwen3Config, params: nnx.State, mesh: Mesh) -> nnx.State:
    """A tree like `params` (arrays or shapes) with a sharding in place of every leaf: fit for jit's in_ and out_shardings."""
    by_path = tensor_shardings(config, mesh)
    return nnx.map_state(lambda path, variable: variable.replace(by_path[path]), params)


def place(value: Any, sharding: Sharding) -> jax.Array:
    """Put a host array, which every process holds whole, onto the mesh; each process keeps its own part."""
    array = np.asarray(value)
    # By device_put and not make_array_from_callback, which the transfer guard takes for a transfer nobody asked for.
    shards = [jax.device_put(array[part], device) for device, part in sharding.addressable_devices_indices_map(array.shape).items()]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def constrain(value: jax.Array, *axes: str | None) -> jax.Array:
    """Ask the compiler to lay out an activation along the mesh set by `jax.set_mesh`; without one, do nothing.

    An axis that does not divide its dimension is left out (decoding 3 rows on fsdp=2 must still run).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return value
    fitting = (
        axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None for axis, size in zip(axes, value.shape, strict=True)
    )
    return jax.lax.with_sharding_constraint(value, PartitionSpec(*fitting))
