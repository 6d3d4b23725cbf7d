"""Qwen3-8B learns Household: the learner on a TPU v5p host, two vLLM replicas of tensor parallel 4 on 8 GPUs.

Hardware: TPU v5p-8 (1 host, 4 chips) for the learner, one host with 8 GPUs of 80 GB for the replicas.
Duration: unmeasured. Expected: unmeasured.
Command: on the GPU host for each half (i = 0 with GPUS=0,1,2,3; i = 1 with GPUS=4,5,6,7), then on the learner's
    CUDA_VISIBLE_DEVICES=GPUS python -m scripts.serve --config=configs/qwen3_8b_gpu.py --backend=vllm \\
        --config.sampler.tensor_parallel=4 --host=rose-gpus --port=800i --replica_id=gpui \\
        --tls_certificate=/etc/rose/tls.pem --tls_key=/etc/rose/tls.key --online_token=file:/etc/rose/online_token \\
        --rollout_token=file:/etc/rose/rollout_token --control_token=file:/etc/rose/control_token \\
        --store=https://rose-learner:7000 --store_token=file:/etc/rose/store_token --store_ca=/etc/rose/ca.pem
    python -m scripts.train --config=configs/qwen3_8b_gpu.py --workdir=runs/qwen3_8b_gpu
"""

from common.config import Config, ReplicaConfig
from configs import qwen3_8b_tpu

NUM_REPLICAS = 2


def get_config() -> Config:
    config = qwen3_8b_tpu.learner_config()
    config.sampler.backend = "vllm"
    config.fleet.replicas += gpu_replicas()
    return config


def gpu_replicas() -> list[ReplicaConfig]:
    return [
        ReplicaConfig(name=f"gpu{idx}", backend="vllm", tensor_parallel=4, address=f"https://rose-gpus:{8000 + idx}")
        for idx in range(NUM_REPLICAS)
    ]
