"""Which replica a run samples with: `sampler.backend` decides, and only the chosen backend is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from common.config import Config
from common.rollout.runner import RunningReplica
from common.serving.loop import EngineLoop
from common.transfer.store.protocol import Store
from rose_jax.models.qwen3_config import Qwen3Config


class TrainingReplica(RunningReplica, Protocol):
    """A replica in the learner's process or beside it, whose live weights can be compared with the learner's."""

    def differing_tensors(self, published: Mapping[str, np.ndarray]) -> list[str]:
        """Names of live tensors whose bits are not those of the published ones, given by checkpoint name."""
        ...


def make_replica(
    replica_id: str,
    config: Config,
    model_config: Qwen3Config,
    store: Store,
    *,
    drive: Callable[..., EngineLoop[Any]] = EngineLoop,
) -> TrainingReplica:
    """A replica without weights, fed from `store`, whose engine `drive` makes the loop of.

    Raises:
        ModuleNotFoundError: the backend is not installed; the text says how to get it.
        ValueError: the backend cannot run this model.
    """
    match config.sampler.backend:
        case "jetstream":
            from rose_jax.replica import JaxReplica

            return JaxReplica(replica_id, config, model_config, store, drive=drive)
        case "vllm":
            from rose_gpu.replica import VllmReplica

            return VllmReplica(replica_id, config, model_config.to_hf(), store, drive=drive)
        case backend:
            raise ValueError(f"sampler.backend={backend!r} is unknown; use jetstream or vllm")
