"""FrozenLake 4x4 with a learning rate of 1e-5 and one update per version: few bf16 weights change from version to version.

Hardware: 2 CPU cores, 2 GB. Duration: about 4 minutes besides set-up.
Expected (500 held-out maps, mean of 3 seeds): sampled success 0.33 before and 0.54 after; 94 % of bf16 weights unchanged a version.
Command: make train CONFIG=configs/frozenlake_sparse_cpu.py
"""

from common.config import Config
from configs import frozenlake_cpu


def get_config() -> Config:
    config = frozenlake_cpu.get_config()
    config.num_versions = 150
    config.optim.lr = 1e-5
    config.optim.schedule = "constant"
    config.grpo.num_minibatches = 1
    config.checkpoint.interval = 25
    return config
