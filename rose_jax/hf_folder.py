"""The files of a Hugging Face checkpoint folder: config.json, one or several safetensors files, their index.

Reading opens every file and checks names before any tensor's data is touched; a tensor is then read slice by slice, so that no
process holds more of it than its own shards. Writing goes to a hidden folder beside the target and is renamed when all is on disk:
a reader sees a whole checkpoint or none.

Invariant: whatever is wrong with a folder becomes one CheckpointError that names the file and, where it applies, the tensor.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from common.errors import CheckpointError

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NUM_NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor in a file: what its header says, and `read_slice`, which reads a part of its data (index -> array)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read_slice: Callable[[tuple[slice, ...]], np.ndarray]


def show_names(names: Iterable[str]) -> str:
    """Names for an error message, the first few of them when there are many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - NUM_NAMES_SHOWN} more" if len(ordered) > NUM_NAMES_SHOWN else ""
    return ", ".join(ordered[:NUM_NAMES_SHOWN]) + more


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: the file is missing, unreadable or no JSON object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is unreadable: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a JSON {type(fields).__name__}, not an object")
    return fields


def read_config(folder: Path) -> dict[str, Any]:
    """The fields of the folder's config.json.

    Raises:
        CheckpointError: there is no such folder, or its config.json is missing or unreadable.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing or no folder; expected a Hugging Face checkpoint with {CONFIG_FILE} in it")
    return read_json(folder / CONFIG_FILE)


def open_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder by their name in the file.

    Raises:
        CheckpointError: no safetensors file, a file that is missing, unreadable or truncated, or an index and files that
            contradict each other.
    """
    if not (folder / INDEX_FILE).exists():
        if not (folder / SINGLE_FILE).exists():
            raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors checkpoints are read")
        return _open_file(folder / SINGLE_FILE)
    file_of = _read_index(folder / INDEX_FILE)
    by_file = {name: _open_file(folder / name) for name in sorted(set(file_of.values()))}
    tensors = {}
    for tensor_name, file_name in file_of.items():
        if tensor_name not in by_file[file_name]:
            raise CheckpointError(f"{folder / INDEX_FILE} says that {tensor_name} is in {file_name}, but that file lacks it")
        tensors[tensor_name] = by_file[file_name][tensor_name]
    for file_name, stored in by_file.items():
        strays = {name for name in stored if file_of.get(name) != file_name}
        if strays:
            raise CheckpointError(
                f"{folder / file_name} holds tensors that {INDEX_FILE} does not place there: {show_names(strays)}"
            )
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for tensor_name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(f"{path} places {tensor_name} in {file_name!r}, which is no file name inside the folder")
    return weight_map


def _open_file(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        file = safe_open(path, framework="np")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} ({path.stat().st_size} bytes) is unreadable or truncated: {error}") from error
    return {
        name: StoredTensor(file=path, shape=tuple(part.get_shape()), dtype=part.get_dtype(), read_slice=part.__getitem__)
        for name, part in slices.items()
    }


def write_folder(
    folder: Path,
    *,
    config_fields: Mapping[str, Any],
    shards: Iterable[Mapping[str, np.ndarray]],
    write_extra: Callable[[Path], None] | None,
    overwrite: bool,
) -> None:
    """Write config.json, the shards (each is asked for when the one before is on disk) and an index if there are several.

    Args:
        write_extra: writes further files, such as the tokenizer's, into the folder it is given.
        overwrite: replace `folder`. For an instant there is then no folder of that name, never a half-written one.

    Raises:
        FileExistsError: the folder exists and `overwrite` is off.
    """
    if folder.exists() and not overwrite:
        raise FileExistsError(f"{folder} exists; choose another folder or pass overwrite=True")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        if write_extra is not None:
            write_extra(partial)
        (partial / CONFIG_FILE).write_text(json.dumps(config_fields, indent=2) + "\n", encoding="utf-8")
        _write_shards(partial, shards)
        for path in partial.iterdir():
            _flush_to_disk(path)
        partial.chmod(0o755)  # mkdtemp makes it private
        _flush_to_disk(partial)
        if folder.exists():
            replaced = Path(tempfile.mkdtemp(prefix=f".{folder.name}.replaced-", dir=folder.parent))
            folder.rename(replaced / folder.name)
            partial.rename(folder)
            shutil.rmtree(replaced)
        else:
            partial.rename(folder)
        _flush_to_disk(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already unless something above failed


def _write_shards(folder: Path, shards: Iterable[Mapping[str, np.ndarray]]) -> None:
    written: list[tuple[Path, list[str]]] = []
    total_bytes = 0
    for shard in shards:
        path = folder / f"shard-{len(written)}.safetensors"
        save_file(dict(shard), path, metadata={"format": "pt"})
        written.append((path, list(shard)))
        total_bytes += sum(array.nbytes for array in shard.values())
    if len(written) == 1:
        written[0][0].rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for shard_idx, (path, names) in enumerate(written):
        file_name = f"model-{shard_idx + 1:05d}-of-{len(written):05d}.safetensors"
        path.rename(folder / file_name)
        weight_map |= dict.fromkeys(names, file_name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
