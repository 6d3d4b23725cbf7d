"""FrozenLake 4x4 learnt by one learner from two replica processes at once, one of JetStream and one of vLLM.

Hardware: 2 CPU cores, 5 GB; needs `make serve-env`. Duration: unmeasured on a free machine, 16 minutes on one with a load of 11.
Expected (500 held-out maps, one seed): sampled success 0.39 before and 0.85 after; JetStream samples 59 % of the tokens.
Command: make train CONFIG=configs/mixed_cpu.py
"""

from common.config import Config, ReplicaConfig
from configs import frozenlake_cpu

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Two engines and a learner share two cores: threads of one would only wait for those of another."""


def get_config() -> Config:
    config = frozenlake_cpu.get_config()
    for backend in ("jetstream", "vllm"):
        replica = ReplicaConfig(name=backend, backend=backend)
        replica.environment.update(ONE_THREAD)
        config.fleet.replicas.append(replica)
    return config
