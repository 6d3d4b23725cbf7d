"""FrozenLake on maps of mixed sizes, 4x4 to 8x8, with a wide turn cap: the long-tailed task that benchmarks roll out.

Hardware: 2 CPU cores, 2 GB. Duration: unmeasured.
Expected (500 held-out maps, 3 seeds): unmeasured.
Command: make train CONFIG=configs/frozenlake_mixed_cpu.py
"""

from common.config import Config
from configs import frozenlake_cpu


def get_config() -> Config:
    config = frozenlake_cpu.get_config()
    config.env.options.max_size = 8
    config.env.options.max_turns = 48
    config.sampler.max_context_tokens = 768
    return config
