"""WorkerWeights: the weights that all workers of an engine hold together. Checks an update, writes it everywhere or nowhere.

What can be known beforehand is checked before the first write: names, shapes, dtypes, completeness, positions. Then each worker
writes its own part, slice by slice; if any of them fails, all of them restore what they had.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt64

from common.errors import RoseError
from common.transfer.bits import BITS_DTYPES
from common.transfer.holding import match_names
from common.transfer.staging import StagedUpdate
from rose_gpu.vllm.update_file import write_update

Rpc = Callable[..., list[Any]]

UPDATE_DIR = Path("/dev/shm")
"""Memory, not disk: an update is written here once and mapped by every worker."""

MAX_SLICE_BYTES = 4 << 20
"""Of values and positions that a slice of a commit writes: some ten milliseconds on a core, less than other engines' steps take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankUpdate:
    """A version that every rank has staged for itself. Sums over the ranks; seconds are those of the slowest."""

    lineage: str
    version: int
    wire_bytes: int
    staged_elements: int
    seconds: dict[str, float]


class CommitError(RoseError):
    """A worker could not write an update; all workers have the old weights back. The text is the worker's own."""


class WorkerWeights:
    """See the module. `rpc` calls a method of RoseWorkerExtension on every worker and returns their answers."""

    def __init__(self, rpc: Rpc, arriving_dtype: str, *, num_workers: int = 1) -> None:
        self._rpc, self._dtype, self._num_workers = rpc, BITS_DTYPES[arriving_dtype], num_workers
        self._specs: Mapping[str, tuple[tuple[int, ...], str]] = {k: v for specs in rpc("weight_specs") for k, v in specs.items()}

    def specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return self._specs

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        """Published bits of the live values at flat positions."""
        bits = np.empty(len(positions), self._dtype)
        num_found = 0
        for found_bytes, held_bytes in self._rpc("read_weights", args=(name, positions.astype(np.int64).tobytes())):
            found = np.frombuffer(found_bytes, np.int64)
            bits[found] = np.frombuffer(held_bytes, self._dtype)
            num_found += len(found)
        assert num_found >= len(positions), f"{name}: the workers hold {num_found} of {len(positions)} positions"
        return bits

    def call_ranks(self, method: str, *args: Any) -> list[Any]:
        """See rose_gpu.vllm.rank_subscriber.Ranks."""
        return self._rpc(method, args=args)

    def commit_staged(self, update: RankUpdate, max_slice_bytes: int) -> Iterator[None]:
        """Write on every rank what it has staged, in slices, yielding between them; see `apply`."""
        finished = False
        try:
            while True:
                answers = self._rpc("write_staged", args=(update.lineage, update.version, max_slice_bytes))
                failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
                if failures:
                    raise CommitError(f"writing version {update.version} failed, the old weights are whole: {failures}")
                if all(written for written, _ in answers):
                    break
                yield
            self._rpc("finish_staged", args=(update.lineage, update.version))
            finished = True
        finally:
            if not finished:
                self._rpc("roll_back_staged")

    def apply(self, update: StagedUpdate, max_slice_bytes: int, path: str | None = None) -> Iterator[None]:
        """Write an update in slices, yielding between them. Raising, or being closed before the end, leaves the old weights whole.

        Args:
            path: where the update lies as a file already, for workers in other processes.

        Raises:
            LayoutMismatchError: its tensors are not those of the model.
            ValueError: it is not complete, or names positions that do not exist.
            CommitError: a worker failed.
        """
        match_names(update.layout, self._specs, (), ())
        _check_runs(update)
        if self._num_workers == 1 or path is not None:
            yield from self._write(update, path or update, max_slice_bytes)
            return
        with tempfile.NamedTemporaryFile(dir=UPDATE_DIR if UPDATE_DIR.is_dir() else None, prefix="rose_update_") as file:
            write_update(update, Path(file.name))
            yield from self._write(update, file.name, max_slice_bytes)

    def _write(self, update: StagedUpdate, source: StagedUpdate | str, max_slice_bytes: int) -> Iterator[None]:
        finished = False
        try:
            self._call("open_update", source)
            for idx, runs in enumerate(_slices(update, max_slice_bytes)):
                if idx:
                    yield
                self._call("write_runs", runs)
            self._rpc("finish_update")
            finished = True
        finally:
            if not finished:
                self._rpc("roll_back_update")

    def _call(self, method: str, argument: object) -> None:
        failures = {rank: text for rank, text in enumerate(self._rpc(method, args=(argument,))) if text is not None}
        if failures:
            raise CommitError(f"{method} failed, the old weights are whole: {failures}")


def _check_runs(update: StagedUpdate) -> None:
    layout = update.layout
    if update.base_version is None and len(update.runs) != layout.num_runs:
        raise ValueError(f"version {update.version} has no base, but only {len(update.runs)} of {layout.num_runs} runs")
    for run, staged in update.runs.items():
        num_elements = sum(box.num_elements for box in staged.tensor.run(staged.run_idx))
        expected = num_elements if staged.local is None else len(staged.local)
        if len(staged.bits) != expected or staged.bits.dtype != BITS_DTYPES[staged.tensor.dtype]:
            raise ValueError(
                f"run {run} of {staged.tensor.name}: {len(staged.bits)} values of {staged.bits.dtype}, expected {expected} of "
                f"{BITS_DTYPES[staged.tensor.dtype]}"
            )
        if staged.local is not None and len(staged.local) and int(staged.local.max()) >= num_elements:
            raise ValueError(f"run {run} of {staged.tensor.name}: position {staged.local.max()} of {num_elements} elements")


def _slices(update: StagedUpdate, max_slice_bytes: int) -> Iterator[list[int]]:
    """Runs in order, in groups of at most so many bytes of values and positions (or a single run)."""
    group: list[int] = []
    size = 0
    for run in sorted(update.runs):
        staged = update.runs[run]
        run_bytes = staged.bits.nbytes + (0 if staged.local is None else staged.local.nbytes)
        if group and size + run_bytes > max_slice_bytes:
            yield group
            group, size = [], 0
        group.append(run)
        size += run_bytes
    yield group
