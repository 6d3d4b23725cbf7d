"""Qwen3 weights from and to Hugging Face checkpoint folders, and under their Hugging Face names.

Which tensor is which parameter stands in models/checkpoint_table.py alone. Loading places each tensor straight into its sharding
and fails on anything it does not know: a tensor that is missing, left over, of another shape or of a type that is no plain float.
Saving writes what transformers and vLLM load; both ways a tied head is one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from common.errors import CheckpointError
from rose_jax.hf_folder import CONFIG_FILE, StoredTensor, open_tensors, read_config, show_names, write_folder
from rose_jax.mesh import tensor_shardings
from rose_jax.models.checkpoint_table import EMBEDDING_NAME, HEAD_NAME, TensorEntry, hf_name, tensor_entries
from rose_jax.models.checkpoint_table import Path as ParamPath
from rose_jax.models.qwen3 import abstract_model
from rose_jax.models.qwen3_config import Qwen3Config

READABLE_DTYPES = ("F32", "BF16", "F16")  # as safetensors writes them
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # computed from rope_theta; old checkpoints carry a copy
MAX_SHARD_BYTES = 4 * 2**30  # bounds the host memory of a save: one shard is gathered at a time


def load_config(folder: Path) -> Qwen3Config:
    """Read config.json.

    Raises:
        CheckpointError: it is missing or unreadable, or asks for what this Qwen3 does not compute.
    """
    fields = read_config(Path(folder))
    try:
        return Qwen3Config.from_hf(fields)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}/{CONFIG_FILE}: {error}") from error


def load_checkpoint(folder: Path, mesh: Mesh | None = None, dtype: jnp.dtype = jnp.float32) -> tuple[Qwen3Config, nnx.State]:
    """Read a model's configuration and parameters; each tensor goes straight to its shards.

    Raises:
        CheckpointError: names file, tensor and, for a wrong shape, both shapes.
    """
    folder = Path(folder)
    config = load_config(folder)
    tensors = {name: tensor for name, tensor in open_tensors(folder).items() if not name.endswith(IGNORED_SUFFIXES)}
    _check_tied_head(config, tensors)
    entries = tensor_entries(config)
    _check_names(entries, tensors, where=str(folder))
    for entry in entries:
        stored = tensors[entry.hf_name]
        _check_shape(entry, stored.shape, where=str(stored.file))
        if stored.dtype not in READABLE_DTYPES:
            raise CheckpointError(
                f"{stored.file}: {entry.hf_name} has dtype {stored.dtype}; only {', '.join(READABLE_DTYPES)} are read"
            )
    shardings: Mapping[ParamPath, Sharding] = {} if mesh is None else tensor_shardings(config, mesh)
    here = SingleDeviceSharding(jax.local_devices()[0])
    arrays = {entry.path: _place(tensors[entry.hf_name], shardings.get(entry.path, here), dtype) for entry in entries}
    return config, _state(config, arrays)


def _place(stored: StoredTensor, sharding: Sharding, dtype: jnp.dtype) -> jax.Array:
    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        part = index if index is not None else (slice(None),) * len(stored.shape)
        return np.asarray(stored.read_slice(part)).astype(dtype)

    return jax.make_array_from_callback(stored.shape, sharding, read)


def _check_tied_head(config: Qwen3Config, tensors: dict[str, StoredTensor]) -> None:
    """Some tied checkpoints carry the head as well: drop it if it is the embedding, refuse it if it differs."""
    if not config.tie_word_embeddings or HEAD_NAME not in tensors or EMBEDDING_NAME not in tensors:
        return
    head, embedding = tensors.pop(HEAD_NAME), tensors[EMBEDDING_NAME]
    whole = (slice(None), slice(None))
    same = head.shape == embedding.shape and np.array_equal(head.read_slice(whole), embedding.read_slice(whole))
    if not same:
        raise CheckpointError(
            f"{head.file}: {HEAD_NAME} {head.shape} differs from {EMBEDDING_NAME} {embedding.shape}, but {CONFIG_FILE} says "
            "tie_word_embeddings=true; set it to false or remove the head"
        )


def _check_names(entries: tuple[TensorEntry, ...], names: Mapping[str, object], *, where: str) -> None:
    expected = {entry.hf_name for entry in entries}
    missing, unexpected = expected - names.keys(), names.keys() - expected
    if missing:
        raise CheckpointError(f"{where}: missing {len(missing)} of {len(expected)} tensors: {show_names(missing)}")
    if unexpected:
        raise CheckpointError(f"{where}: {len(unexpected)} tensors that this model does not have: {show_names(unexpected)}")


def _check_shape(entry: TensorEntry, shape: tuple[int, ...], *, where: str) -> None:
    if shape != entry.shape:
        raise CheckpointError(f"{where}: {entry.hf_name} has shape {shape}, but {CONFIG_FILE} asks for {entry.shape}")


def _state(config: Qwen3Config, arrays: Mapping[ParamPath, jax.Array]) -> nnx.State:
    _, shapes = nnx.split(abstract_model(config))
    return nnx.map_state(lambda path, variable: variable.replace(arrays[path]), shapes)


def named_tensors(params: nnx.State) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter under its Hugging Face name, in checkpoint orientation; no copies."""
    for path, variable in nnx.to_flat_state(params):
        yield hf_name(path), variable[...]


def params_from_named(config: Qwen3Config, named: Mapping[str, jax.Array | np.ndarray]) -> nnx.State:
    """The inverse of `named_tensors`; arrays stay where they are.

    Raises:
        CheckpointError: a tensor is missing, left over or of another shape.
    """
    entries = tensor_entries(config)
    _check_names(entries, named, where="named tensors")
    for entry in entries:
        _check_shape(entry, tuple(named[entry.hf_name].shape), where="named tensors")
    return _state(config, {entry.path: jnp.asarray(named[entry.hf_name]) for entry in entries})


def save_checkpoint(
    folder: Path,
    params: nnx.State,
    config: Qwen3Config,
    *,
    dtype: str | jnp.dtype,
    save_tokenizer: Callable[[Path], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a folder that transformers and vLLM load, all of it or nothing. Blocks until it is on disk.

    Under jax.distributed all processes must call it: each tensor is gathered, the first process writes.

    Args:
        dtype: float32, bfloat16 or float16; values are rounded to it.
        save_tokenizer: writes the tokenizer's files into the folder it is given.
        max_shard_bytes: a file holds at least one tensor, and more while they fit.

    Raises:
        FileExistsError: the folder exists and `overwrite` is off.
        CheckpointError: params are not those of a model with this config.
    """
    named = dict(named_tensors(params))
    entries = tensor_entries(config)
    _check_names(entries, named, where="parameters to save")
    for entry in entries:
        _check_shape(entry, named[entry.hf_name].shape, where="parameters to save")
    shards = _gather_shards(((entry.hf_name, named[entry.hf_name]) for entry in entries), np.dtype(dtype), max_shard_bytes)
    if jax.process_index() == 0:
        name = np.dtype(dtype).name
        fields = config.to_hf() | {"dtype": name, "torch_dtype": name}  # transformers 5 reads the first, older readers the second
        write_folder(folder, config_fields=fields, shards=shards, write_extra=save_tokenizer, overwrite=overwrite)
    else:
        for _ in shards:
            pass
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"saved {folder}")


def _gather_shards(
    tensors: Iterator[tuple[str, jax.Array]], dtype: np.dtype, max_shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    shard_bytes = 0
    for name, tensor in tensors:
        whole = multihost_utils.process_allgather(tensor, tiled=True) if jax.process_count() > 1 else jax.device_get(tensor)
        array = np.ascontiguousarray(np.asarray(whole).astype(dtype))
        if shard and shard_bytes + array.nbytes > max_shard_bytes:
            yield shard
            shard, shard_bytes = {}, 0
        shard[name] = array
        shard_bytes += array.nbytes
    yield shard
