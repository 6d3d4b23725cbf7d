"""Which part of which checkpoint tensor a vLLM parameter of this rank holds, read off the model itself.

vLLM fuses projections, cuts them for tensor parallelism, pads vocabularies and replicates key-value heads, and says so in the types
and sizes of its modules. From those, not from a list of models, follows for each parameter the parts of checkpoint tensors that it
is made of. Quantized, packed or unknown sharded parameters are refused by name: a wrong guess would be wrong weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Box [start, start + extent) of a checkpoint tensor of `shape`, at rows [param_row, param_row + extent[0]) of a parameter.

    Along all further axes the parameter has exactly the box. `replicated`: every rank holds all of the tensor.
    """

    tensor: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    param: torch.Tensor
    param_row: int
    replicated: bool


def find_parts(model: torch.nn.Module) -> Iterator[Part]:
    """All parts of all parameters; one that several modules share (a tied head) comes once, under the name it has first.

    Raises:
        ValueError: a parameter whose layout is not understood; the text names it.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for param_name, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            _check_plain(f"{module_name}.{param_name}", param)
            yield from _parts_of(module_name, module, param_name, param.data, fused)


def _check_plain(name: str, param: torch.Tensor) -> None:
    if param.numel() == 0:
        raise ValueError(
            f"{name} is empty: vLLM packed it away after loading; rose_gpu.vllm.plugin.keep_weights_in_place must run before load"
        )
    if not param.is_floating_point() or param.element_size() == 1:
        raise ValueError(
            f"{name} has dtype {param.dtype}: quantized weights cannot be updated in place; load the model unquantized"
        )
    if not param.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(param.shape)} has strides {param.stride()}; only contiguous ones are updated")


def _parts_of(module_name: str, module: Any, param_name: str, param: torch.Tensor, fused: dict[str, list[str]]) -> Iterator[Part]:
    parent, _, leaf = module_name.rpartition(".")
    tensor = f"{module_name}.{param_name}" if module_name else param_name
    whole = tuple(param.shape)

    def rows(name: str, size: int, start: int, count: int, param_row: int, *, replicated: bool = False) -> Part:
        return Part(
            tensor=name,
            shape=(size, *whole[1:]),
            start=(start, *(0 for _ in whole[1:])),
            extent=(count, *whole[1:]),
            param=param,
            param_row=param_row,
            replicated=replicated,
        )

    if hasattr(module, "shard_indices"):  # embedding and head; tested first: heads look column-parallel too
        shard = module.shard_indices
        if shard.added_vocab_end_index > shard.added_vocab_start_index:
            raise ValueError(f"{tensor}: added vocabulary (LoRA) cannot be updated in place; load the model without it")
        first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
        yield rows(tensor, module.org_vocab_size, first, end - first, 0)
    elif hasattr(module, "input_is_parallel") and len(whole) == 2:  # row-parallel: each rank has its columns
        columns = whole[1]
        yield Part(
            tensor=tensor,
            shape=(whole[0], module.input_size),
            start=(0, module.tp_rank * columns),
            extent=whole,
            param=param,
            param_row=0,
            replicated=module.tp_size == 1,
        )
    elif hasattr(module, "output_partition_sizes") and not hasattr(module, "input_is_parallel"):
        names = fused.get(leaf, [leaf])
        sizes = list(module.output_partition_sizes)
        if len(names) != len(sizes) or sum(sizes) != whole[0]:
            raise ValueError(f"{tensor} {list(whole)} is made of {len(sizes)} parts of {sizes} rows, but named {names}")
        row = 0
        for name, count, (rank, ranks) in zip(names, sizes, _ranks(module, len(sizes)), strict=True):
            full_name = ".".join(filter(None, (parent, name, param_name)))
            yield rows(full_name, count * ranks, rank * count, count, row, replicated=ranks == 1)
            row += count
    elif len(whole) <= 1 or getattr(module, "tp_size", 1) == 1:  # norms, biases of row-parallel layers, replicated layers
        yield Part(tensor=tensor, shape=whole, start=(0,) * len(whole), extent=whole, param=param, param_row=0, replicated=True)
    else:
        raise ValueError(f"{tensor} {list(whole)}: how a {type(module).__name__} is cut for tensor parallelism is not known here")


def _ranks(module: Any, num_parts: int) -> list[tuple[int, int]]:
    """For each fused part (this rank's place, number of places): key-value heads may be held by several ranks."""
    place = (module.tp_rank, module.tp_size)
    if not hasattr(module, "num_kv_head_replicas"):
        return [place] * num_parts
    replicas = module.num_kv_head_replicas
    return [place] + [(module.tp_rank // replicas, module.tp_size // replicas)] * (num_parts - 1)
