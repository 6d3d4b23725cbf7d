"""Small Qwen3 checkpoints as vLLM loads them, and engines on them."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.options import VllmOptions

SHAPE = {
    "vocab_size": 40,  # vLLM pads it to 64
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}
EMBEDDING_STD = 0.2


@functools.cache
def tensors(seed: int, dtype: str = "float32", **changes: Any) -> dict[str, np.ndarray]:
    """All weights by checkpoint name."""
    from flax import nnx

    from rose_jax.export import named_tensors
    from rose_jax.models.qwen3 import create_model
    from rose_jax.models.qwen3_config import Qwen3Config

    config = Qwen3Config(**{**SHAPE, "tie_word_embeddings": True, **changes})
    params = nnx.state(create_model(config, seed=seed, embedding_init_std=EMBEDDING_STD))
    return {name: np.asarray(tensor).astype(np.dtype(dtype)) for name, tensor in named_tensors(params)}


def write_checkpoint(folder: Path, weights: Mapping[str, np.ndarray], **changes: Any) -> str:
    """A folder that vLLM loads, with these weights in it."""
    from rose_jax.hf_folder import write_folder
    from rose_jax.models.qwen3_config import Qwen3Config

    dtype = next(iter(weights.values())).dtype.name
    fields = Qwen3Config(**{**SHAPE, "tie_word_embeddings": True, **changes}).to_hf() | {"dtype": dtype, "torch_dtype": dtype}
    write_folder(folder, config_fields=fields, shards=iter([weights]), write_extra=None, overwrite=True)
    return str(folder)


@functools.cache
def _base_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="rose_vllm_models_")


@functools.cache
def checkpoint(seed: int, dtype: str = "float32", **changes: Any) -> str:
    """The folder of the model whose weights are tensors(seed, dtype, **changes); it goes when the tests end."""
    name = "-".join(map(str, (seed, dtype, *sorted(changes.items())))).replace(" ", "")
    return write_checkpoint(Path(_base_folder().name) / name, tensors(seed, dtype, **changes), **changes)


def engine(model_dir: str, **options: Any) -> VllmEngine:
    return VllmEngine(VllmOptions(**{"model_dir": model_dir, "max_slots": 4, "max_context_tokens": 64, **options}))


def nudged(old: Mapping[str, np.ndarray], *, share: float, seed: int = 0) -> dict[str, np.ndarray]:
    """A new version in which about `share` of all elements differ, in every tensor at least one."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in old.items():
        changed = rng.random(tensor.shape) < share
        changed.flat[rng.integers(tensor.size)] = True
        values = tensor.astype(np.float32) * np.where(changed, 1.5, 1.0) + np.where(changed, 0.01, 0.0)
        new[name] = np.where(changed, values.astype(tensor.dtype), tensor)
    return new


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
