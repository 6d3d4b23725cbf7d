"""A configuration for tests: a whole run of scripts.train that takes seconds and compiles few programs.

What it learns is of no interest. 64 tokens hold every episode, so that each part of the run sees one shape only.
"""

from common.config import Config


def get_config() -> Config:
    config = Config()
    config.num_versions = 4
    config.env.options.max_turns = 3
    config.model.num_layers = 1
    config.model.hidden_size = 32
    config.model.num_heads = 1
    config.model.num_kv_heads = 1
    config.model.intermediate_size = 64
    config.sampler.max_slots = 8
    config.sampler.max_context_tokens = 64
    config.warmup.num_updates = 6
    config.warmup.batch_size = 8
    config.warmup.validation_interval = 3
    config.warmup.num_validation_tasks = 8
    config.grpo.prompts_per_step = 2
    config.grpo.group_size = 4
    config.eval.num_tasks = 4
    config.checkpoint.interval = 1
    config.checkpoint.warmup_interval = 2
    return config
