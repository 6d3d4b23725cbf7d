"""Chooses how each run travels: by size, or by predicted time where the rate of the link is known.

Encode, wire and decode overlap from bucket to bucket, so the time of a run is that of the slowest of the three. On a fast link the
wire is never the slowest, and above some density plain values win although they are many times larger.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Shaped

from common.transfer import delta, fingerprint
from common.transfer.changes import Changes, estimate_density, find_changes, gather_run, run_positions
from common.transfer.shards import TensorLayout

# Seconds on one core (numpy 2.4, AVX-512 server): they steer a choice, so a factor of two does not matter.
COMPARE_S_PER_BYTE = 0.3e-9
CHANGE_S = 50e-9
"""Per changed element, on either side: encode or decode, fingerprint, gather or scatter."""
DENSE_CHANGES_S = 10e-9
"""Per element of a run that is encoded without positions."""
PLAIN_S_PER_BYTE = 0.6e-9
"""Fingerprint, checksum and copies of plain values, on either side."""
COMPRESS_S_PER_BYTE = 3e-9
COMPRESSED_SHARE = 0.75
"""Byte planes of trained bfloat16 weights, by zstd."""
DENSE_SHARE = 0.2
"""Share of changed elements from which on a run is encoded without positions."""
TRY_WHOLE_SHARE = 0.6
"""Encoded changes larger than this share of the dense size are compared with the compressed values."""


@dataclasses.dataclass(frozen=True)
class EncodedRun:
    """One run ready for its bucket. `changes` is None where no positions were made; `num_changed` counts every element of a run
    that travels whole without having been compared. Its flat positions are those of the array it was found in."""

    parts: delta.Parts
    fingerprint: int
    num_changed: int
    changes: Changes | None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a run lies in memory: run `run_idx` of an array with the layout `tensor`, which may be a part of the whole tensor."""

    tensor: TensorLayout
    run_idx: int


def encode_run(
    tensor: TensorLayout,
    run_idx: int,
    old: Shaped[np.ndarray, "N"],
    new: Shaped[np.ndarray, "N"],
    old_fingerprint: int,
    link_gbit_s: float | None,
    place: Place | None = None,
) -> EncodedRun | None:
    """What changed in a run between two versions of its tensor, or None if nothing did. Parts may share the memory of `new`.

    Args:
        place: where the run lies in `old` and `new`; None: they are the whole tensor.
    """
    held = place or Place(tensor, run_idx)
    density = estimate_density(held.tensor, held.run_idx, old, new)
    if link_gbit_s is not None and _plain_is_faster(density, old.itemsize, link_gbit_s):
        return encode_whole_run(tensor, run_idx, new, None, link_gbit_s, place)
    num_elements = sum(box.num_elements for box in tensor.run(run_idx))
    changes: Changes | None = None
    if density > DENSE_SHARE:
        values = gather_run(held.tensor, held.run_idx, new)
        parts, num_changed = delta.encode_dense_changes(gather_run(held.tensor, held.run_idx, old), values)
        print_ = fingerprint_run(tensor, run_idx, values)
    else:
        changes = find_changes(held.tensor, held.run_idx, old, new)
        num_changed = len(changes.local)
        flat = changes.flat if place is None else run_positions(tensor, run_idx, changes.local)
        print_ = fingerprint.add(old_fingerprint, fingerprint.of_change(flat, changes.old, changes.new, tensor.row_elements))
        parts = delta.encode_changes(changes.local, changes.old, changes.new, num_elements) if num_changed else []
    if num_changed == 0:
        return None
    size = sum(map(len, parts))
    if size > TRY_WHOLE_SHARE * num_elements * old.itemsize:
        whole = encode_whole_run(tensor, run_idx, new, print_, None, place)
        if sum(map(len, whole.parts)) < size:
            return dataclasses.replace(whole, num_changed=num_changed)
    return EncodedRun(parts, print_, num_changed, changes)


def encode_whole_run(
    tensor: TensorLayout,
    run_idx: int,
    bits: Shaped[np.ndarray, "N"],
    known_fingerprint: int | None,
    link_gbit_s: float | None,
    place: Place | None = None,
) -> EncodedRun:
    """All values of a run, compressed where the link is slow enough to want it. Parts may share the memory of `bits`."""
    held = place or Place(tensor, run_idx)
    values = gather_run(held.tensor, held.run_idx, bits)
    if known_fingerprint is None:
        known_fingerprint = fingerprint_run(tensor, run_idx, values)
    compress = link_gbit_s is None or (1 - COMPRESSED_SHARE) * 8e-9 / link_gbit_s > COMPRESS_S_PER_BYTE
    parts = delta.encode_whole(values, compress=compress)
    return EncodedRun(parts, known_fingerprint, values.size, None)


def fingerprint_run(tensor: TensorLayout, run_idx: int, values: Shaped[np.ndarray, "n"]) -> int:
    """The fingerprint of a whole run, given its elements in the run's order."""
    total, done = 0, 0
    for box in tensor.run(run_idx):
        total = fingerprint.add(total, fingerprint.of_box(tensor, box, values[done : done + box.num_elements]))
        done += box.num_elements
    return total


def _plain_is_faster(density: float, item_bytes: int, link_gbit_s: float) -> bool:
    """Seconds per dense byte of the slowest stage, for plain values and for changes."""
    wire_s = 8e-9 / link_gbit_s
    entropy_share = min(1.0, density * (12 - 6 * density) / (8 * item_bytes))  # close enough from 0.1 % to 100 %
    change_s = DENSE_CHANGES_S if density > DENSE_SHARE else density * CHANGE_S
    changes_s = COMPARE_S_PER_BYTE + change_s / item_bytes
    return max(PLAIN_S_PER_BYTE, wire_s) < max(changes_s, wire_s * entropy_share)
