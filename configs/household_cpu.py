"""Household (2 rooms x 3 containers, 8 objects) with a 0.15M-parameter Qwen3, learnt from nothing on two CPU cores.

Hardware: 2 CPU cores, 2 GB. Duration: 8 to 10 minutes with both cores busy otherwise, a third of it evaluations.
Expected: greedy success on held-out object-container pairs 0.40 before and 0.84 as the mean of the last three evaluations (seeds 0,
1, 2: 0.92, 0.92, 0.67); sampled success 0.45 and 0.85.
Command: make train CONFIG=configs/household_cpu.py
"""

from common.config import Config


def get_config() -> Config:
    config = Config()
    config.num_versions = 60
    config.env.factory = "common.rollout.envs.household:HouseholdSuite"
    config.env.options.max_turns = 20
    config.warmup.num_updates = 280
    config.warmup.random_action_share = 0.25
    config.warmup.batch_size = 24
    config.optim.lr = 5e-4
    config.eval.interval = 10
    return config
