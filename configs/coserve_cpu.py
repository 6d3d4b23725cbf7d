"""FrozenLake 4x4 learnt on a dedicated replica and on one that serves replayed online traffic at the same time.

Hardware: 2 CPU cores, 4 GB. Duration: 2.7 minutes, of which 1.0 is the training itself.
Expected: sampled success 0.37 before and 0.79 after (200 held-out maps, one seed); of 295 online requests 97.6 % met their
objectives, none failed; 44 % of the rollout's tokens were borrowed.
Command: make train CONFIG=configs/coserve_cpu.py   (ARGS="--config.fleet.replicas[1].backend=vllm" after `make serve-env`)
"""

from common.config import Config, ReplicaConfig
from configs import frozenlake_cpu
from configs.mixed_cpu import ONE_THREAD


def get_config() -> Config:
    config = frozenlake_cpu.get_config()
    config.num_versions = 20
    config.eval.num_tasks = 200
    # Few array shapes: a co-serving replica compiles all of them before it takes calls.
    config.sampler.max_slots, config.sampler.max_context_tokens = 32, 128
    config.sampler.page_tokens, config.sampler.max_prefill_tiles = 16, 16
    serving = config.coserving
    serving.model.num_heads, serving.model.num_kv_heads, serving.model.head_dim = 4, 4, 64
    serving.model.hidden_size, serving.model.intermediate_size, serving.model.num_layers = 256, 768, 4
    serving.sampler.max_slots, serving.sampler.max_context_tokens, serving.sampler.max_step_tokens = 8, 384, 128
    serving.sampler.page_tokens, serving.sampler.max_prefill_tiles = 32, 4
    serving.ttft_s, serving.tpot_s = 0.3, 0.05
    serving.traffic.trace = "azure2023_conv_pub"
    serving.traffic.prompts, serving.traffic.outputs = 0.05, 0.1
    for name in ("dedicated", "coserving"):
        replica = ReplicaConfig(name=name, coserve=name == "coserving")
        replica.environment.update(ONE_THREAD)
        config.fleet.replicas.append(replica)
    return config
