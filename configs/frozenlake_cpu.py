"""FrozenLake 4x4 on random maps with a 0.15M-parameter Qwen3, learnt from nothing on two CPU cores.

Hardware: 2 CPU cores, 2 GB. Duration: about 3 minutes besides set-up.
Expected (500 held-out maps, mean of 3 seeds): sampled success 0.33 before and 0.85 after, greedy 0.69 and 0.87.
Command: make train   (or: python -m scripts.train --config=configs/frozenlake_cpu.py --workdir=runs/frozenlake_cpu)
"""

from common.config import Config


def get_config() -> Config:
    config = Config()
    config.num_versions = 60
    config.optim.schedule = "cosine"
    config.warmup.random_action_share = 0.4
    # 24 tokens show the grid, 7 go to each of at most 12 turns; up to 3 more a turn when the agent babbles.
    config.sampler.max_context_tokens = 160
    return config
