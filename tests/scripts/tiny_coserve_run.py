"""A configuration for tests: tiny_run.py with a dedicated and a co-serving JetStream replica, and online requests."""

from common.config import Config, ReplicaConfig
from tests.scripts import tiny_run


def get_config() -> Config:
    config = tiny_run.get_config()
    config.coserving.model.num_layers = 1
    sampler = config.coserving.sampler
    sampler.max_slots, sampler.max_context_tokens, sampler.max_step_tokens = 2, 64, 64
    sampler.page_tokens, sampler.max_prefill_tiles = 32, 2
    config.coserving.ttft_s, config.coserving.tpot_s = 5.0, 2.0
    traffic = config.coserving.traffic
    traffic.trace, traffic.end_s = "azure2023_conv_pub", 3.0
    traffic.prompts, traffic.outputs = 0.01, 0.02
    for name in ("alone", "shared"):
        replica = ReplicaConfig(name=name, coserve=name == "shared")
        replica.environment.update(XLA_FLAGS="--xla_cpu_multi_thread_eigen=false", JAX_PLATFORMS="cpu")
        config.fleet.replicas.append(replica)
    return config
