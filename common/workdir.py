"""The folder of one run: locked while in use, with the resolved configuration as config.json.

Locking and recording are two calls, so that a run which turns out not to fit the folder leaves its config.json alone. Invariant:
two processes never train in one folder at the same time, and the lock goes with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

from common.config import Config

CONFIG_FILE = "config.json"


def config_json(config: Config) -> str:
    """All fields of a configuration as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=lambda options: options.to_dict()) + "\n"


def _changed_fields(old: object, new: object, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [line for name in names for line in _changed_fields(old.get(name), new.get(name), f"{path}.{name}".lstrip("."))]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


@contextlib.contextmanager
def open_workdir(workdir: Path) -> Iterator[Path]:
    """Make the folder if need be and lock it. Nothing else in it is touched.

    Raises:
        ValueError: another process uses the folder, or it cannot be made or written to.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("w")
    except OSError as error:
        is_file = workdir.exists() and not workdir.is_dir()
        why = "it is a file" if is_file else f"{error.filename}: {error.strerror}"
        raise ValueError(f"--workdir={workdir} cannot be used: {why}; name a folder you may write to") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--workdir={workdir} is in use by another process; wait for it or name another folder") from None
        yield workdir


def changed_fields(workdir: Path, config: Config) -> list[str]:
    """What differs from the recorded configuration, a line for each field; nothing if none was recorded.

    Raises:
        ValueError: the recorded one cannot be read.
    """
    path = workdir / CONFIG_FILE
    if not path.exists():
        return []
    try:
        return _changed_fields(json.loads(path.read_text()), json.loads(config_json(config)))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); remove it, it only serves to show what changed") from error


def record_config(workdir: Path, config: Config) -> list[str]:
    """Write config.json whole or not at all, and return what differs from the one that was there, as `changed_fields` does."""
    changed = changed_fields(workdir, config)
    path = workdir / CONFIG_FILE
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(config_json(config))
    os.replace(temporary, path)
    return changed
