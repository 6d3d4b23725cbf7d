"""The few file operations a DirectoryStore needs, on a local folder or on anything fsspec reaches (gs://, s3://, memory://).

A file appears whole or not at all: locally by writing beside it and renaming, on object stores because a put is atomic there. Paths
are joined from checked names only; nothing here interprets them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from typing import Protocol

from common.transfer.errors import MalformedUpdateError
from common.transfer.store.protocol import Parts


class Files(Protocol):
    """Paths are relative, with '/' between names."""

    def write(self, path: str, parts: Parts) -> None: ...

    def read(self, path: str, start: int, length: int | None, into: memoryview | None) -> memoryview | None:
        """None if there is no such file."""
        ...

    def list(self, path: str) -> dict[str, int | None]:
        """Names in a folder with their sizes (None for folders); empty if there is no such folder."""
        ...

    def delete(self, path: str) -> None:
        """Delete a file. A missing one changes nothing."""
        ...

    def delete_tree(self, path: str) -> None:
        """Make a folder disappear, at once if the medium can."""
        ...


class LocalFiles:
    """Files below a folder of this machine, private to the user. Contents are not synced to disk: a lost machine loses them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, path: str, parts: Parts) -> None:
        target = self.root / path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = target.parent / f".{uuid.uuid4().hex}"
        try:
            with temporary.open("wb") as file:
                for part in parts:
                    file.write(part)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, path: str, start: int, length: int | None, into: memoryview | None) -> memoryview | None:
        try:
            file = (self.root / path).open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with file:
            size = max(os.fstat(file.fileno()).st_size - start, 0)
            size = size if length is None else min(size, length)
            if into is None:
                into = memoryview(bytearray(size))
            elif size > len(into):
                raise MalformedUpdateError(f"{path} has {size} bytes where at most {len(into)} are possible")
            file.seek(start)
            done = 0
            while done < size and (got := file.readinto(into[done:size])):
                done += got
            return into[:done]

    def list(self, path: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = None if entry.is_dir() else entry.stat().st_size
        return found

    def delete(self, path: str) -> None:
        (self.root / path).unlink(missing_ok=True)

    def delete_tree(self, path: str) -> None:
        trash = self.root / f".{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.root / path, trash)
            shutil.rmtree(trash)


class FsspecFiles:
    """Files below a URL that fsspec understands. Credentials are fsspec's own affair (environment, metadata service)."""

    def __init__(self, url: str) -> None:
        import fsspec

        self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"

    def write(self, path: str, parts: Parts) -> None:
        target = self._path(path)
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(target, b"".join(parts))

    def read(self, path: str, start: int, length: int | None, into: memoryview | None) -> memoryview | None:
        try:
            content = memoryview(self._fs.cat_file(self._path(path), start=start, end=None if length is None else start + length))
        except FileNotFoundError:
            return None
        if into is None:
            return content
        if len(content) > len(into):
            raise MalformedUpdateError(f"{path} has {len(content)} bytes where at most {len(into)} are possible")
        into[: len(content)] = content
        return into[: len(content)]

    def list(self, path: str) -> dict[str, int | None]:
        try:
            entries = self._fs.ls(self._path(path), detail=True, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except TypeError:  # file systems without a listings cache take no `refresh`
            entries = self._fs.ls(self._path(path), detail=True)
        return {e["name"].rstrip("/").rpartition("/")[2]: None if e["type"] == "directory" else int(e["size"]) for e in entries}

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def delete_tree(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(path), recursive=True)
