"""RankReceiver: the subscriber of one worker. It fetches what this rank holds, from the store itself, beside the running model.

Staging runs in a thread of its own while the worker serves; `state` says how far it is. A commit has two moves, so that all ranks
make it or none: `write` puts the staged values in place, keeping what they displace, and `finish` or `roll_back` ends it. What the
rank holds is read off the model each time a version is staged, never remembered. Errors leave as (type, text): exceptions do not
cross processes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt64

from common.transfer.boxes import Box
from common.transfer.errors import TransferError
from common.transfer.paths import Held
from common.transfer.secrets import read_secret
from common.transfer.staging import StagedUpdate
from common.transfer.subscriber import Subscriber
from rose_gpu.vllm.rank_weights import RankWeights
from rose_gpu.vllm.store_address import StoreAddress


class RankTarget:
    """The weights of one worker as a WeightTarget: `apply` keeps what was written before, or writes it now."""

    def __init__(self, weights: RankWeights) -> None:
        self._weights = weights
        self._written: tuple[StagedUpdate, int] | None = None

    def specs(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self._weights.specs()

    def owned(self, name: str) -> tuple[Box, ...]:
        return self._weights.boxes(name)

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        found, held = self._weights.read(name, positions.view(np.int64))
        if len(found) != len(positions):
            raise ValueError(f"{name}: this rank holds {len(found)} of {len(positions)} positions it was asked for")
        bits = np.empty(len(positions), f"u{held.itemsize}")
        bits[found] = held.view(bits.dtype)
        return bits

    def write_some(self, update: StagedUpdate, max_bytes: int) -> bool:
        """Write the next runs of an update, at least one and about so many bytes. True when all are written."""
        done = self._written[1] if self._written is not None and self._written[0] is update else 0
        runs, size = sorted(update.runs), 0
        while done < len(runs) and size < max_bytes:
            run = update.runs[runs[done]]
            self._weights.write(run)
            size += run.bits.nbytes + (0 if run.local is None else run.local.nbytes)
            done += 1
            self._written = update, done
        return done == len(runs)

    def apply(self, update: StagedUpdate) -> None:
        while not self.write_some(update, 1 << 30):
            pass
        self._weights.finish()
        self._written = None

    def roll_back(self) -> None:
        self._weights.rollback()
        self._written = None


class RankReceiver:
    """See the module.

    Args:
        elsewhere: names of tensors that other ranks hold and this one does not.
    """

    def __init__(self, weights: RankWeights, address: StoreAddress, *, receiver_id: str, elsewhere: Collection[str]) -> None:
        self._weights, self._target = weights, RankTarget(weights)
        self._subscriber = Subscriber(
            address.open(),
            self._target,
            receiver_id=receiver_id,
            key=None if address.key is None else read_secret(address.key).value,
            timeout_s=address.timeout_s,
            skip_sources=elsewhere,
        )
        self._staged: StagedUpdate | None = None
        self._error: tuple[str, str] | None = None
        self._thread: threading.Thread | None = None
        self._confirming: threading.Thread | None = None

    def start(self, version: int) -> None:
        """Stage a version in the background; the one before it must have ended."""
        assert self._thread is None or not self._thread.is_alive(), "a version is being staged"
        self._error = None
        self._weights.refresh()
        self._thread = threading.Thread(target=self._stage, args=(version,), name="stage", daemon=True)
        self._thread.start()

    def state(self) -> dict[str, Any]:
        """Of the newest `start`: whether it still runs, how it failed, or what it took."""
        if self._thread is not None and self._thread.is_alive():
            return {"running": True}
        if self._error is not None:
            return {"running": False, "error": self._error}
        staged = self._staged
        if staged is None:  # nothing newer than what is held
            held = self._subscriber.held
            version = {} if held is None else {"lineage": held.lineage, "version": held.version}
            return {"running": False, **version, "wire_bytes": 0, "staged_elements": 0, "seconds": {}}
        report = {"wire_bytes": staged.wire_bytes, "staged_elements": staged.staged_elements, "seconds": staged.seconds}
        return {"running": False, "lineage": staged.lineage, "version": staged.version, **report}

    def write(self, goal: Held, max_bytes: int) -> bool:
        """Write the next piece of what is staged. True when all of it is written; nothing is served from it before `finish`."""
        if self._subscriber.held == goal:
            return True
        assert self._staged is not None, f"{goal} is not staged"
        staged = Held(self._staged.lineage, self._staged.version)
        assert staged == goal, f"{staged} is staged, not {goal}"
        self._subscriber.check_base(self._staged)
        return self._target.write_some(self._staged, max_bytes)

    def finish(self, goal: Held) -> None:
        """Keep what `write` has written, on every rank."""
        if self._subscriber.held != goal and self._staged is not None:
            for _ in self._subscriber.commit_in_slices(self._staged):
                pass
            self._confirming = threading.Thread(target=self._subscriber.confirm, name="confirm", daemon=True)  # engine steps go on
            self._confirming.start()
        self._staged = None

    def roll_back(self) -> None:
        """Restore what `write` displaced; the version stays staged."""
        self._target.roll_back()

    def close(self) -> None:
        self._subscriber.close()

    def _stage(self, version: int) -> None:
        if self._confirming is not None:
            self._confirming.join()
        try:
            self._staged = self._subscriber.stage(version)
        except (TransferError, ValueError, OSError, MemoryError) as error:
            self._error = type(error).__name__, str(error)
        except BaseException as error:
            self._error = type(error).__name__, str(error)
            raise
