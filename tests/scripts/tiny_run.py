"""A configuration for tests: a whole run of scripts.train that takes seconds, compiles few programs, and still learns something.

3x3 maps take four moves, so that after a short warm-up some episodes of a group succeed and others do not. 64 tokens hold every
episode: the update sees one shape.
"""

from common.config import Config


def get_config() -> Config:
    config = Config()
    config.num_versions = 4
    config.env.options.update(size=3, max_turns=6, num_train=30, num_validation=4, num_held_out=5)
    config.model.num_layers = 1
    config.sampler.max_slots = 4
    config.sampler.max_context_tokens = 64
    config.sampler.max_prefill_tiles = 4
    config.sampler.page_tokens = 32
    config.warmup.num_updates = 40
    config.warmup.batch_size = 16
    config.warmup.validation_interval = 20
    config.grpo.prompts_per_step = 2
    config.grpo.group_size = 4
    config.eval.num_tasks = 5
    config.eval.interval = 2
    config.eval.num_tasks_in_run = 4
    config.checkpoint.interval = 1
    config.checkpoint.warmup_interval = 15
    return config
