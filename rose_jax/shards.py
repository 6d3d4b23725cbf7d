"""Which part of an array lies where: boxes of the devices here, and which process publishes which box.

Everything is read off the arrays' shardings, each time anew, so a restore or a reshard cannot be overlooked. Nothing is gathered:
what another process holds is never asked for, and a box that several devices hold is taken from one of them.
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from common.transfer.boxes import Box, box_of_slices
from common.transfer.ownership import Owners, merged
from common.transfer.source import ShardedTensor, Source


def local_parts(array: jax.Array) -> list[tuple[Box, jax.Array]]:
    """The distinct boxes that devices of this process hold, each with its values on one of them."""
    parts: dict[Box, jax.Array] = {}
    for shard in array.addressable_shards:
        parts.setdefault(box_of_slices(array.shape, shard.index), shard.data)
    return list(parts.items())


def owners_of(array: jax.Array, name: str) -> Owners:
    """Every box of an array with the process of the first device that holds it, the same list on every process."""
    return _owners(array.sharding, array.shape, name)


@functools.lru_cache(maxsize=4096)
def _owners(sharding: jax.sharding.Sharding, shape: tuple[int, ...], name: str) -> Owners:
    first: dict[Box, int] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        first.setdefault(box_of_slices(shape, index), device.process_index)  # type: ignore[attr-defined]
    return merged(shape, tuple(first.items()), name)


def source_of(array: jax.Array, name: str) -> Source:
    """What a publisher reads of an array: all of it, or the boxes that this process publishes if there are several."""
    if jax.process_count() == 1:
        return np.asarray(array)
    return ShardedTensor(
        shape=array.shape, dtype=np.dtype(array.dtype), owners=owners_of(array, name), read=functools.partial(_read, array)
    )


def _read(array: jax.Array, box: Box) -> np.ndarray:
    """A box on the host, put together from the shards that lie in it; all of them are this process's."""
    values = np.empty(box.extent, array.dtype)
    num_found = 0
    for held, data in local_parts(array):
        common = held.intersection(box)
        if common is not None:
            values[common.relative_to(box).slices] = np.asarray(data)[common.relative_to(held).slices]
            num_found += common.num_elements
    assert num_found == box.num_elements, f"{num_found} of {box.num_elements} elements of {box} are on devices of this process"
    return values
