"""What a worker offers so that it can fetch its own part of each version; RankSubscriber calls it on all workers at once.

A part of the worker extension that needs nothing of vLLM. Arguments and answers are what JSON can carry; a failure is an answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from common.transfer.paths import Held
from rose_gpu.vllm.rank_receiver import RankReceiver
from rose_gpu.vllm.rank_weights import RankWeights
from rose_gpu.vllm.store_address import StoreAddress


class RankMethods:
    """See the module; the attributes named below are set by whoever has loaded the model."""

    rank: int
    rose_weights: RankWeights

    def weight_boxes(self) -> dict[str, tuple[list[int], str, list[tuple[list[int], list[int]]]]]:
        """(shape of the whole tensor, dtype, [(start, extent) of what this rank holds]) by name."""
        return {
            name: (list(shape), dtype, [(list(box.start), list(box.extent)) for box in self.rose_weights.boxes(name)])
            for name, (shape, dtype) in self.rose_weights.specs().items()
        }

    def open_receiver(self, address: dict[str, Any], receiver_id: str, names: list[str]) -> str | None:
        """Let this rank fetch for itself. `names`: the tensors of all ranks together."""

        def open_it() -> None:
            elsewhere = set(names) - self.rose_weights.specs().keys()
            self.rose_receiver = RankReceiver(
                self.rose_weights, StoreAddress(**address), receiver_id=f"{receiver_id}.{self.rank}", elsewhere=elsewhere
            )

        return text_of_failure(open_it)

    def start_staging(self, version: int) -> str | None:
        return text_of_failure(lambda: self.rose_receiver.start(version))

    def staging_state(self) -> dict[str, Any]:
        return self.rose_receiver.state()

    def write_staged(self, lineage: str, version: int, max_bytes: int) -> tuple[bool, str | None]:
        """(whether all is written, text of a failure)."""
        written = False

        def write() -> None:
            nonlocal written
            written = self.rose_receiver.write(Held(lineage, version), max_bytes)

        failure = text_of_failure(write)
        return written, failure

    def finish_staged(self, lineage: str, version: int) -> None:
        self.rose_receiver.finish(Held(lineage, version))

    def roll_back_staged(self) -> None:
        self.rose_receiver.roll_back()


def text_of_failure(action: Callable[[], None]) -> str | None:
    """None if the action succeeds."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error} [{traceback.format_exc(limit=-1).splitlines()[-3].strip()}]"
    return None
