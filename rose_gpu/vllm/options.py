"""What an engine on vLLM is built with, in our terms, and its translation into vLLM's arguments.

Validated once, before vLLM starts: each refusal names both numbers and the fix. Made of plain values, so that it can be sent to the
process that will build the engine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from common.serving.engine import EngineInfo, StaleCache
from common.transfer.bits import ITEM_BYTES
from rose_gpu.vllm.environment import require_cuda

WORKER_EXTENSION = "rose_gpu.vllm.worker_extension.RoseWorkerExtension"
SCHEDULER = "rose_gpu.vllm.scheduler.PlannedScheduler"
KV_BYTES_TO_START = 1 << 20
"""vLLM wants a size of the cache in bytes, or it measures memory; the number of blocks given beside it is what counts."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """One engine.

    Args:
        model_dir: a Hugging Face folder; config.json alone is enough when `load_weights` is off.
        max_step_tokens: the most that a step can ever hold; StepLimits above it count as this.
        cache_tokens: capacity of the key-value cache, rounded up to blocks; None: every slot full.
        dtype: of parameters and activations.
        published_dtype: in which weights arrive, if narrower than `dtype`; widening is exact, and so is the way back.
        load_weights: read them from `model_dir`; otherwise they are arbitrary until the first commit.
        prefix_reuse: keep what ended requests computed, for prompts that begin alike.
        stale_cache: what a commit does to cached state of older weights.
        cuda_graphs, sleep_mode, kvcached: only on CUDA.
    """

    model_dir: str
    max_slots: int
    max_context_tokens: int
    max_step_tokens: int = 2048
    block_tokens: int = 32
    cache_tokens: int | None = None
    dtype: str = "float32"
    published_dtype: str | None = None
    tensor_parallel: int = 1
    load_weights: bool = True
    prefix_reuse: bool = True
    stale_cache: StaleCache = StaleCache.KEEP
    cuda_graphs: bool = False
    sleep_mode: bool = False
    kvcached: bool = False
    name: str = "vllm"

    def __post_init__(self) -> None:
        if self.max_slots < 1 or self.max_context_tokens < 2:
            raise ValueError(f"max_slots={self.max_slots} must be at least 1, max_context_tokens={self.max_context_tokens} 2")
        if self.block_tokens < 1 or self.tensor_parallel < 1:
            raise ValueError(f"block_tokens={self.block_tokens} and tensor_parallel={self.tensor_parallel} must be at least 1")
        if self.max_step_tokens < self.max_slots:
            raise ValueError(f"max_step_tokens={self.max_step_tokens} has no room for one token of each of {self.max_slots} slots")
        for name in ("dtype", "published_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise ValueError(f"{name}={value!r} is unknown; use one of {', '.join(DTYPES)}")
        if ITEM_BYTES[self.arriving_dtype] > ITEM_BYTES[self.dtype]:
            raise ValueError(f"published_dtype={self.arriving_dtype} would be rounded to dtype={self.dtype}; use a wider dtype")
        if self.num_blocks < self.blocks_of(self.max_context_tokens):
            raise ValueError(
                f"cache_tokens={self.cache_tokens} cannot hold one request of max_context_tokens={self.max_context_tokens} in "
                f"blocks of {self.block_tokens}; raise the first or lower the second"
            )

    @property
    def arriving_dtype(self) -> str:
        return self.published_dtype or self.dtype

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use; vLLM keeps one more for itself."""
        if self.cache_tokens is None:
            return self.max_slots * self.blocks_of(self.max_context_tokens)
        return self.blocks_of(self.cache_tokens)

    def blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def info(self) -> EngineInfo:
        fields = json.loads((Path(self.model_dir) / "config.json").read_text())
        return EngineInfo(
            name=self.name,
            vocab_size=fields["vocab_size"],
            max_slots=self.max_slots,
            max_context_tokens=self.max_context_tokens,
        )

    def engine_arguments(self) -> dict[str, Any]:
        """For vllm.EngineArgs. Imports vLLM.

        Raises:
            ValueError: an option that this machine does not have, or a model that vLLM on CPU cannot run.
        """
        require_cuda(cuda_graphs=self.cuda_graphs, sleep_mode=self.sleep_mode, kvcached=self.kvcached)
        self._check_for_cpu()
        return {
            "model": self.model_dir,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # not the folder's: sampling is what a request says
            "use_tqdm_on_load": False,
            "load_format": "auto" if self.load_weights else "dummy",
            "dtype": self.dtype,
            "seed": 0,
            "max_model_len": self.max_context_tokens,
            "max_num_seqs": self.max_slots,
            "max_num_batched_tokens": self.max_step_tokens,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": self.prefix_reuse,
            "block_size": self.block_tokens,
            "num_gpu_blocks_override": self.num_blocks + 1,
            "kv_cache_memory_bytes": KV_BYTES_TO_START,
            "scheduler_reserve_full_isl": False,
            "scheduler_cls": SCHEDULER,
            "worker_extension_cls": WORKER_EXTENSION,
            "async_scheduling": False,  # tokens of a step in flight at a commit would be labelled with the new version
            "tensor_parallel_size": self.tensor_parallel,
            "distributed_executor_backend": "uni" if self.tensor_parallel == 1 else "mp",
            "enforce_eager": not self.cuda_graphs,
            "enable_sleep_mode": self.sleep_mode,
            "disable_log_stats": True,
        }

    def _check_for_cpu(self) -> None:
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return
        fields = json.loads((Path(self.model_dir) / "config.json").read_text())
        head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        if head_dim < 32:
            raise ValueError(f"{self.model_dir}: head_dim={head_dim}, but attention of vLLM on CPU needs at least 32")
        if self.block_tokens % 32:
            raise ValueError(f"block_tokens={self.block_tokens} must be a multiple of 32 on CPU")
