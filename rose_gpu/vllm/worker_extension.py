"""What vLLM's workers learn from us: our sampler, and weights that are read and written at checkpoint coordinates.

vLLM mixes this class into its worker class and calls its methods through collective_rpc, in this process or in spawned ones, where
only this module's import comes before the model is loaded: the packing of weights is switched off right here. Methods report a
failure as text and never raise, since one rank's exception would leave the other ranks' answers in the queue.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.serving import parking
from common.transfer.bits import BITS_DTYPES
from common.transfer.staging import StagedUpdate
from rose_gpu.vllm.environment import end_with_parent
from rose_gpu.vllm.plugin import keep_weights_in_place
from rose_gpu.vllm.rank_methods import RankMethods, text_of_failure
from rose_gpu.vllm.rank_weights import RankWeights
from rose_gpu.vllm.update_file import read_update

keep_weights_in_place()
end_with_parent()


class RoseWorkerExtension(RankMethods):
    """Methods of each worker; the attributes named below are the worker's own."""

    rank: int
    model_runner: Any

    def install_rose(self, arriving_dtype: str) -> str | None:
        """Once, after the model is loaded and before the first request. Returns the name of the workers' shared memory, if any."""
        from rose_gpu.vllm.sampler import KeyedSampler

        self.rose_weights = RankWeights(self.model_runner.get_model(), arriving_dtype)
        self.rose_dtype = BITS_DTYPES[arriving_dtype]
        self.rose_update: StagedUpdate | None = None
        self.rose_moving: tuple[str, Iterator[int]] | None = None
        self.model_runner.sampler = KeyedSampler(self.model_runner)
        return os.environ.get("VLLM_DIST_IDENT")

    @torch.inference_mode()
    def zero_cache(self) -> None:
        """All keys and values, of whatever request."""
        for cache in self.model_runner.kv_caches:
            cache.zero_()

    def move_piece(self, work: str) -> tuple[int, str | None]:
        """A piece of work "park" or "activate": bytes moved, 0 when there is nothing left; and the failure, if any."""
        moved = 0

        def move() -> None:
            nonlocal moved
            if self.rose_moving is None or self.rose_moving[0] != work:
                self.rose_moving = (work, self._pieces(work))
            moved = next(self.rose_moving[1], 0)

        failure = text_of_failure(move)
        if failure is not None or not moved:
            self.rose_moving = None
        return moved, failure

    def _pieces(self, work: str) -> Iterator[int]:
        parameters = self.model_runner.get_model().parameters()
        weights = [_range(weight) for weight in parameters if weight.device.type == "cpu" and not weight.is_shared()]
        if work == "activate":
            return parking.activate(weights)
        caches = [_range(cache) for cache in self.model_runner.kv_caches if cache.device.type == "cpu"]
        return itertools.chain(parking.park(weights), parking.discard(caches))

    def weight_specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self.rose_weights.specs()

    def read_weights(self, name: str, positions: bytes) -> tuple[bytes, bytes]:
        """(indices into the positions, bits) of what this rank has; replicated tensors are read from rank 0."""
        if self.rank != 0 and self.rose_weights.is_replicated(name):
            return b"", b""
        found, bits = self.rose_weights.read(name, np.frombuffer(bytearray(positions), np.int64))
        return found.astype(np.int64).tobytes(), bits.tobytes()

    def open_update(self, update: StagedUpdate | str) -> str | None:
        """Take an update, or the path of one, to write from."""

        def open_it() -> None:
            self.rose_update = read_update(Path(update)) if isinstance(update, str) else update

        return text_of_failure(open_it)

    def write_runs(self, runs: list[int]) -> str | None:
        def write() -> None:
            assert self.rose_update is not None
            for run in runs:
                self.rose_weights.write(self.rose_update.runs[run])

        return text_of_failure(write)

    def finish_update(self) -> None:
        self.rose_weights.finish()
        self.rose_update = None

    def roll_back_update(self) -> None:
        self.rose_weights.rollback()
        self.rose_update = None


def _range(tensor: torch.Tensor) -> parking.Range:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
