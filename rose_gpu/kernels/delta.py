"""Change detection and apply in torch, on whatever device holds the weights.

`find_changes` has fixed shapes and needs no value on the host, so it neither waits for the device nor breaks a CUDA graph (torch's
own nonzero does both): blocks are counted, each output slot finds its block by binary search in the running counts, and its place
within the block by a running sum over that block alone. `apply_changes` writes in place.

Everything works on bit patterns held in signed integers of the same width (torch has few operations on unsigned ones).
"""

from __future__ import annotations

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

BLOCK_ELEMENTS = 128

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Changes = tuple[Int64[Tensor, ""], Int64[Tensor, "C"], Shaped[Tensor, "C"]]


def to_bits(weights: Shaped[Tensor, "..."]) -> Shaped[Tensor, "N"]:
    """Flat bit patterns as signed integers, sharing the memory of a contiguous tensor.

    Raises:
        ValueError: the tensor is not contiguous, or its dtype is not 1, 2 or 4 bytes wide.
    """
    if not weights.is_contiguous():
        raise ValueError(f"a tensor of shape {list(weights.shape)} and strides {weights.stride()} is not contiguous")
    if weights.element_size() not in _BITS:
        raise ValueError(f"dtype {weights.dtype} is {weights.element_size()} bytes wide; 1, 2 and 4 can travel")
    return weights.detach().reshape(-1).view(_BITS[weights.element_size()])


def find_changes_reference(old: Shaped[Tensor, "..."], new: Shaped[Tensor, "..."], *, capacity: int) -> Changes:
    """How many elements differ, their flat positions in order and their new bits, padded to `capacity` with position N.

    If more than `capacity` differ the count says so and the rest is the first `capacity` of them.
    """
    old_bits, new_bits = _check(old, new)
    found = (old_bits != new_bits).nonzero().reshape(-1)
    positions = torch.full((capacity,), old_bits.numel(), dtype=torch.int64, device=old.device)
    bits = torch.zeros(capacity, dtype=new_bits.dtype, device=old.device)
    kept = found[:capacity]
    positions[: len(kept)], bits[: len(kept)] = kept, new_bits[kept]
    return torch.tensor(len(found), device=old.device), positions, bits


def find_changes(old: Shaped[Tensor, "..."], new: Shaped[Tensor, "..."], *, capacity: int) -> Changes:
    """See find_changes_reference."""
    old_bits, new_bits = _check(old, new)
    size = old_bits.numel()
    if size == 0:
        empty = torch.zeros(capacity, dtype=torch.int64, device=old.device)
        return empty.new_zeros(()), empty, empty.to(new_bits.dtype)
    differs = torch.nn.functional.pad(old_bits != new_bits, (0, -size % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    ends = differs.sum(1, dtype=torch.int64).cumsum(0)
    slot = torch.arange(capacity, device=old.device)
    block = torch.searchsorted(ends, slot, right=True).clamp_(max=len(ends) - 1)
    rows = differs[block]
    rank = slot - (ends[block] - rows.sum(1, dtype=torch.int64))
    # In the row, the wanted element is preceded by as many as have a running count of at most `rank`.
    within = (rows.cumsum(1, dtype=torch.int32) <= rank[:, None]).sum(1)
    known = slot < ends[-1]
    positions = torch.where(known, block * BLOCK_ELEMENTS + within, size)
    bits = torch.where(known, new_bits[positions.clamp(max=size - 1)], 0)
    return ends[-1], positions, bits


def apply_changes_reference(weights: Shaped[Tensor, "..."], positions: Int64[Tensor, "C"], bits: Shaped[Tensor, "C"]) -> None:
    """Write new bits at flat positions, in place; positions of N (padding) write nothing. Twice equals once."""
    flat = to_bits(weights)
    known = positions < flat.numel()
    flat[positions[known]] = bits[known]


def apply_changes(weights: Shaped[Tensor, "..."], positions: Int64[Tensor, "C"], bits: Shaped[Tensor, "C"]) -> None:
    """See apply_changes_reference. Padding comes after all real positions, as find_changes gives it; the host waits for nothing."""
    flat = to_bits(weights)
    if flat.numel() == 0 or positions.numel() == 0:
        return
    # Padding repeats the first write, or writes back what is there if there is none: equal values may collide.
    any_known = positions[0] < flat.numel()
    first = torch.where(any_known, positions[0], 0)
    first_bits = torch.where(any_known, bits[0], flat[first])
    known = positions < flat.numel()
    flat.index_put_((torch.where(known, positions, first),), torch.where(known, bits, first_bits))


def _check(old: Shaped[Tensor, "..."], new: Shaped[Tensor, "..."]) -> tuple[Tensor, Tensor]:
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ValueError(f"old is {old.dtype}{list(old.shape)}, new is {new.dtype}{list(new.shape)}: they must be alike")
    return to_bits(old), to_bits(new)
