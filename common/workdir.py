"""The folder of one run: locked while in use, with the resolved configuration as config.json.

Invariant: two processes never train in one folder at the same time, and the lock goes with its process, however that ends.
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


def config_json(config: Config) -> str:
    """All fields of a configuration as indented JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=lambda options: options.to_dict()) + "\n"


def _changed_fields(old: object, new: object, path: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [line for name in names for line in _changed_fields(old.get(name), new.get(name), f"{path}.{name}".lstrip("."))]
    return [] if old == new else [f"{path}: {old!r} -> {new!r}"]


@contextlib.contextmanager
def open_workdir(workdir: Path, config: Config) -> Iterator[Path]:
    """Make the folder, lock it, write config.json, and say what changed since the run began.

    Raises:
        ValueError: another process uses the folder, or it cannot be made.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--workdir={workdir} cannot be made: {error.strerror}; name a folder you may write to") from error
    with (workdir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--workdir={workdir} is in use by another process; wait for it or name another folder") from None
        path, text = workdir / "config.json", config_json(config)
        if path.exists():
            changed = _changed_fields(json.loads(path.read_text()), json.loads(text))
            if changed:
                print("Configuration changed since this run began:", *changed, sep="\n  ")
        temporary = path.with_suffix(".json.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)
        yield workdir
