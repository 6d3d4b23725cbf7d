"""A replica whose completions vLLM makes: engine, the target its weights arrive at, and the subscriber that brings them.

It starts without weights of its own: vLLM allocates the model from its config.json, and the first version comes through the store
like every other.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config
from common.serving.engine import StaleCache
from common.serving.loop import EngineLoop
from common.serving.replica import LocalReplica
from common.transfer.staging import StagedUpdate
from common.transfer.store.protocol import Store
from common.transfer.subscriber import Subscriber
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.group import WorkerGroup
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.rank_subscriber import RankSubscriber
from rose_gpu.vllm.store_address import StoreAddress
from rose_gpu.vllm.target import VllmWeightTarget

MAX_STEP_TOKENS = 8192
"""vLLM allocates buffers for the largest step; above this they cost memory and no step is faster."""


class VllmReplica(LocalReplica[StagedUpdate]):
    """See the module. Leaving it closes its engine.

    Args:
        hf_config: the fields of the model's config.json.
        ranks_store: where every rank fetches its own part, if `store` is one that other processes can reach; None: this process
            fetches all of each version and hands it to the ranks.
        drive: see LocalReplica.
    """

    def __init__(
        self,
        replica_id: str,
        config: Config,
        hf_config: Mapping[str, Any],
        store: Store,
        *,
        ranks_store: StoreAddress | None = None,
        drive: Callable[..., EngineLoop[StagedUpdate]] = EngineLoop,
    ) -> None:
        sampler = config.sampler
        with tempfile.TemporaryDirectory(prefix="rose_vllm_") as folder:
            dtype = config.model.compute_dtype
            (Path(folder) / "config.json").write_text(json.dumps({**hf_config, "dtype": dtype, "torch_dtype": dtype}))
            options = VllmOptions(
                model_dir=folder,
                load_weights=False,
                max_slots=sampler.max_slots,
                max_context_tokens=sampler.max_context_tokens,
                max_step_tokens=max(sampler.max_slots, min(sampler.max_step_tokens, MAX_STEP_TOKENS)),
                dtype=dtype,
                published_dtype=config.model.weights_dtype,
                tensor_parallel=sampler.tensor_parallel,
                stale_cache=StaleCache(sampler.stale_cache),
            )
            engine = WorkerGroup(options) if sampler.own_process or sampler.tensor_parallel > 1 else VllmEngine(options)
        self._vllm = engine
        self.target = VllmWeightTarget(engine)
        subscriber: Subscriber | RankSubscriber
        if ranks_store is None:
            subscriber = Subscriber(store, self.target, receiver_id=replica_id, timeout_s=config.transfer.timeout_s)
        else:
            subscriber = RankSubscriber(engine, ranks_store, receiver_id=replica_id)
        super().__init__(
            replica_id,
            engine,
            subscriber,  # type: ignore[arg-type]  # of either kind: what a replica calls is the same
            max_step_tokens=sampler.max_step_tokens,
            drive=drive,
        )

    async def __aexit__(self, *exc: object) -> None:
        await super().__aexit__(*exc)
        self._vllm.close()

    def differing_tensors(self, published: Mapping[str, np.ndarray]) -> list[str]:
        """Names of live tensors whose bits are not those of the published ones."""
        return [name for name, tensor in published.items() if tensor.tobytes() != self.target.published(name).tobytes()]
