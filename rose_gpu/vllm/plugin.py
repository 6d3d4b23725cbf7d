"""The vLLM plugin of this package: keeps weights where an update can find them. vLLM loads it in every process, workers included.

On CPU, vLLM packs the weights of linear layers into oneDNN's own format after loading: the parameter becomes empty, an update in
place has nothing to write to, and a tied head keeps computing with its packed copy of the old embedding. Here the layer is left to
multiply by its parameter. That costs packed speed (17-26 % at 8 streams of a small model) and is exact: what is written into the
parameter is what the next step multiplies by. Acts only in processes that `environment.prepare` has marked, so that other users of
vLLM in the same installation keep theirs.
"""

from __future__ import annotations

import os
from typing import Any

from rose_gpu.vllm.environment import IN_PLACE_VARIABLE


def register() -> None:
    """Entry point of the group vllm.general_plugins. Idempotent."""
    if os.environ.get(IN_PLACE_VARIABLE) == "1":
        keep_weights_in_place()


def keep_weights_in_place() -> None:
    """Replace the packing of weights after load by a plain product; call before a model is loaded. Idempotent."""
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _use_parameter


def _use_parameter(layer: Any, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear
