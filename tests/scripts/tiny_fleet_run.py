"""A configuration for tests: tiny_run.py with two JetStream replicas as processes."""

from common.config import Config, ReplicaConfig
from tests.scripts import tiny_run


def get_config() -> Config:
    config = tiny_run.get_config()
    config.num_versions = 6
    config.checkpoint.interval = 2
    for name in ("left", "right"):
        replica = ReplicaConfig(name=name)
        replica.environment.update(XLA_FLAGS="--xla_cpu_multi_thread_eigen=false", JAX_PLATFORMS="cpu")
        config.fleet.replicas.append(replica)
    return config
