"""Qwen3-8B learns Household from both accelerators at once: four JetStream replicas on TPU and two vLLM replicas on 8 GPUs.

Hardware: TPU v5p-16 as in qwen3_8b_tpu.py and a host with 8 GPUs as in qwen3_8b_gpu.py, in one network.
Duration: unmeasured. Expected: unmeasured.
Command: start the replicas of qwen3_8b_tpu.py and qwen3_8b_gpu.py as written there, then on the learner's host
    python -m scripts.train --config=configs/qwen3_8b_mixed.py --workdir=runs/qwen3_8b_mixed
"""

from common.config import Config
from configs import qwen3_8b_gpu, qwen3_8b_tpu


def get_config() -> Config:
    config = qwen3_8b_tpu.get_config()
    config.fleet.replicas += qwen3_8b_gpu.gpu_replicas()
    return config
