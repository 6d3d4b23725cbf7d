"""Checkpoints of a run under one folder, by Orbax's CheckpointManager: sharded arrays, host progress, and a seal.

A checkpoint counts once its seal is written, which names every file with size and hash and comes last. So a save that was cut off
at any moment, and a file that was truncated, changed or lost later, are all seen before a value is read; such a checkpoint is named
in a warning and the next older one is used. If checkpoints were finished and none is whole, that is an error: a run never starts
over in silence. Older checkpoints are deleted only when a newer one is sealed.

Saves block. The next update donates the very buffers a background save would still be reading, so an asynchronous save would need
a second copy of all state; blocking costs seconds every few versions and no memory.

Arrays are stored under their tree paths and cut as they lie on the devices; they restore onto any mesh and any number of processes
that see the same folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import xxhash
from jax.experimental import multihost_utils

from common.config import Config
from common.errors import CheckpointError
from rose_jax.models.qwen3_config import Qwen3Config

logger = logging.getLogger(__name__)

SEALS_FOLDER = "seals"
HASH_CHUNK_BYTES = 16 * 2**20  # bounds the memory of hashing, whatever the size of a file
PROGRESS_ITEM = "progress"

Fingerprint = Mapping[str, str | int | float | bool | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """One checkpoint: its step, its arrays by item name, and what the caller saved as progress."""

    step: int
    arrays: dict[str, Any]
    progress: dict[str, Any]


def config_fingerprint(config: Config, model_config: Qwen3Config) -> dict[str, str | int | float | bool | None]:
    """What must not change over a run's life: the model, what is published, the environment and the seed of all draws."""
    model = {
        f"model.{name}": ",".join(map(str, value)) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(model_config).items()
    }
    return model | {
        "model.weights_dtype": config.model.weights_dtype,
        "env.factory": config.env.factory,
        "seed": config.seed,
    }


def check_fingerprint(saved: Fingerprint, current: Fingerprint, *, directory: Path) -> None:
    """Refuse to go on from a checkpoint of another run.

    Raises:
        ValueError: names each field with both values, and the fix.
    """
    different = [
        f"{name}={saved.get(name)!r} in the checkpoint, {current.get(name)!r} now"
        for name in sorted(saved.keys() | current.keys())
        if saved.get(name) != current.get(name)
    ]
    if different:
        raise ValueError(
            f"{directory} holds a run with another configuration: {'; '.join(different)}. "
            "Set these back to go on with it, or start anew in another --workdir"
        )


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by tree path: what is on disk does not depend on the classes of the containers."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator=".") or "value": leaf for path, leaf in leaves}


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _write_seal(folder: Path, seal: Path) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    contents = {str(path.relative_to(folder)): [path.stat().st_size, _hash_file(path)] for path in files}
    temporary = seal.with_suffix(".tmp")
    with temporary.open("w") as file:
        json.dump({"files": contents}, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(seal)


def _find_damage(folder: Path, seal: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None if every byte is as it was sealed."""
    try:
        contents = [(name, int(size), str(digest)) for name, (size, digest) in json.loads(seal.read_text())["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its seal {seal} is unreadable ({error})"
    for name, size_bytes, digest in contents:
        path = folder / name
        if not path.is_file():
            return f"file {name} is missing"
        if path.stat().st_size != size_bytes:
            return f"file {name} has {path.stat().st_size} bytes, not {size_bytes}"
        if _hash_file(path) != digest:
            return f"file {name} has other contents than were written"
    return None


@contextlib.contextmanager
def _orbax_raises_only() -> Iterator[None]:
    """Without the log lines in which Orbax's threads repeat, stack by stack, the error that it raises anyway."""
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    absl_logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        absl_logger.setLevel(level)


def _reason(error: Exception) -> str:
    """What the system said, without the path through the layers of a database that the storage library puts before it."""
    return str(error).rpartition("Failed writing: ")[2].replace("\n", " ")


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


class Checkpoints:
    """The checkpoints of one run. Under jax.distributed every process makes the same calls on a folder they all see."""

    def __init__(self, directory: Path, *, keep: int, fingerprint: Fingerprint) -> None:
        """Open or make the folder; what a save that was cut off left behind is named in a warning.

        Args:
            keep: number of newest checkpoints that are not deleted.
        """
        self._directory = directory.absolute()
        self._seals = self._directory / SEALS_FOLDER
        self._keep = keep
        self._fingerprint = dict(fingerprint)
        self._is_primary = jax.process_index() == 0
        self._damaged: set[int] = set()
        if self._is_primary:
            self._seals.mkdir(parents=True, exist_ok=True)
            self._name_leftovers()
        self._barrier("checkpoints_open")
        self._manager = ocp.CheckpointManager(
            self._directory, options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False, save_root_metadata=False)
        )

    @property
    def steps(self) -> list[int]:
        """Steps of all sealed checkpoints that are not known to be damaged, oldest first."""
        return sorted(set(self._sealed_steps()) - self._damaged)

    def _sealed_steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self._seals.glob("*.json") if path.stem.isdecimal())

    def _seal(self, step: int) -> Path:
        return self._seals / f"{step}.json"

    def _barrier(self, name: str) -> None:
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(name)

    def _name_leftovers(self) -> None:
        """Orbax's temporary folders are removed; a folder that only lacks its seal stays until its step is saved again."""
        sealed = set(self._sealed_steps())
        for path in sorted(self._directory.iterdir()):
            if path.name.isdecimal() and int(path.name) not in sealed:
                logger.warning("skipping checkpoint %s: its save was not finished, it has no seal", path)
            elif not path.name.isdecimal() and path != self._seals:
                logger.warning("skipping %s: left behind by a save that was not finished; removed", path)
                _remove(path)

    def _delete(self, step: int) -> None:
        self._seal(step).unlink(missing_ok=True)  # first, so that a deletion cut off half-way leaves no seal on half a checkpoint
        shutil.rmtree(self._directory / str(step), ignore_errors=True)
        self._damaged.discard(step)

    def save(self, step: int, *, arrays: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Write a checkpoint and block until it is whole on disk; then delete what `keep` no longer covers.

        Args:
            step: larger than that of every whole checkpoint here. An unfinished or damaged one of the same step is replaced.
            arrays: trees of jax arrays by item name; not kept, free to be donated afterwards.
            progress: values that JSON keeps.

        Raises:
            CheckpointError: it could not be written (no room, no right). The checkpoints before it are as they were.
        """
        assert PROGRESS_ITEM not in arrays
        folder = self._directory / str(step)
        if self._is_primary:
            assert step not in self.steps, f"checkpoint {folder} exists"
            self._delete(step)
        self._barrier(f"checkpoint_cleared_{step}")
        self._manager.reload()
        items: dict[str, Any] = {name: ocp.args.StandardSave(_flat(tree)) for name, tree in arrays.items()}
        record = {"fingerprint": self._fingerprint, "items": sorted(arrays), "progress": dict(progress)}
        items[PROGRESS_ITEM] = ocp.args.JsonSave(record)
        try:
            with _orbax_raises_only():
                self._manager.save(step, args=ocp.args.Composite(**items), force=True)
                self._manager.wait_until_finished()
            if self._is_primary:
                _write_seal(folder, self._seal(step))
        except (OSError, ValueError) as error:  # ValueError is what the storage library makes of the system's refusals
            raise CheckpointError(
                f"checkpoint {folder} could not be written: {_reason(error)}; make room or mend the folder, then run the same "
                f"command again: it goes on from {f'checkpoint {self.steps[-1]}' if self.steps else 'the beginning'}"
            ) from error
        if self._is_primary:
            self._delete_old()
        self._barrier(f"checkpoint_sealed_{step}")
        self._manager.reload()

    def _delete_old(self) -> None:
        oldest_kept = self.steps[-self._keep :][0]
        folders = {int(path.name) for path in self._directory.iterdir() if path.name.isdecimal()}
        for step in sorted(folders | set(self._sealed_steps())):
            if step < oldest_kept:
                self._delete(step)

    def restore_latest(self, abstract_arrays: Mapping[str, Any]) -> Restored | None:
        """Read the newest whole checkpoint, or return None if none was ever finished here.

        Args:
            abstract_arrays: for each item that may be there, a tree of jax.ShapeDtypeStruct with the shardings to restore to.

        Raises:
            CheckpointError: checkpoints were finished here, but none is whole.
            ValueError: the newest whole one is of another configuration.
        """
        step = self._find_newest_whole()
        if step is None:
            return None
        record = self._manager.restore(step, args=ocp.args.Composite(progress=ocp.args.JsonRestore()))[PROGRESS_ITEM]
        check_fingerprint(record["fingerprint"], self._fingerprint, directory=self._directory / str(step))
        targets = {name: abstract_arrays[name] for name in record["items"]}
        items = {name: ocp.args.StandardRestore(_flat(tree)) for name, tree in targets.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        arrays = {name: _unflatten(restored[name], like=tree) for name, tree in targets.items()}
        return Restored(step=step, arrays=arrays, progress=record["progress"])

    def _find_newest_whole(self) -> int | None:
        """Check from the newest on, in the primary process alone, and tell all others."""
        sealed = self._sealed_steps() if self._is_primary else []
        newest_whole: int | None = None
        for step in reversed(sealed):
            damage = _find_damage(self._directory / str(step), self._seal(step))
            if damage is None:
                newest_whole = step
                break
            self._damaged.add(step)
            logger.warning("skipping checkpoint %s: %s", self._directory / str(step), damage)
        num_sealed, is_found, step = self._from_primary(len(sealed), int(newest_whole is not None), newest_whole or 0)
        if num_sealed and not is_found:
            raise CheckpointError(
                f"none of the {num_sealed} checkpoints in {self._directory} is whole (warnings above say what is wrong); "
                "bring one back from a copy, or start anew in another --workdir"
            )
        return step if is_found else None

    def _from_primary(self, *values: int) -> list[int]:
        if jax.process_count() == 1:
            return list(values)
        return [int(value) for value in multihost_utils.broadcast_one_to_all(np.array(values))]

    def close(self) -> None:
        """Free what the manager holds. Idempotent."""
        self._manager.close()


def _unflatten(flat: Mapping[str, Any], *, like: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in _flat(like)])
