"""What would stop a run after its warm-up, found before its first update.

Looks at the task suite as the run will use it: enough tasks in each split, an environment that starts, first prompts that fit. It
plays no episode; what goes wrong later in one ends that episode alone.
"""

from __future__ import annotations

import asyncio

from common.config import Config
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Demonstrator, TaskSuite
from common.types import Split


def check_suite(config: Config, suite: TaskSuite, chat: ChatTokenizer) -> None:
    """Blocks until the first task of each split that the run uses has been reset once.

    Raises:
        ValueError: names the field or the task, its value and the fix.
    """
    if suite.max_turns < 1:
        raise ValueError(f"{config.env.factory} has max_turns={suite.max_turns}; an episode needs at least 1 turn")
    needed = _tasks_needed(config)
    for split, (num_tasks, wanted_by) in needed.items():
        num_there = suite.num_tasks(split)
        if num_there < num_tasks:
            raise ValueError(
                f"{wanted_by} needs {num_tasks} {split.value} tasks, but {config.env.factory} has {num_there}; "
                "lower the first or raise the second by env.options"
            )
    for split in needed:
        _check_first_prompt(config, suite, chat, split)


def _tasks_needed(config: Config) -> dict[Split, tuple[int, str]]:
    """How many tasks of a split there must be, and for what."""
    needed = {
        Split.TRAIN: (1, "training"),
        Split.HELD_OUT: (config.eval.num_tasks, f"eval.num_tasks={config.eval.num_tasks}"),
    }
    if config.eval.interval and config.eval.num_tasks_in_run > config.eval.num_tasks:
        num_tasks = config.eval.num_tasks_in_run
        needed[Split.HELD_OUT] = (num_tasks, f"eval.num_tasks_in_run={num_tasks}")
    if config.warmup.num_updates and config.warmup.validation_interval:
        interval = config.warmup.validation_interval
        needed[Split.VALIDATION] = (1, f"warmup.validation_interval={interval} (0 does without)")
    return needed


def _check_first_prompt(config: Config, suite: TaskSuite, chat: ChatTokenizer, split: Split) -> None:
    task = suite.task(split, 0)
    environment = suite.make_environment()
    if config.warmup.num_updates and not isinstance(environment, Demonstrator):
        raise ValueError(
            f"warmup.num_updates={config.warmup.num_updates}, but {type(environment).__name__} of {config.env.factory} cannot "
            "demonstrate; set it to 0, or give the environment expert_action and random_action"
        )

    async def first_observation() -> str:
        try:
            return await asyncio.wait_for(environment.reset(task), config.env.turn_timeout_s)
        finally:
            await environment.close()

    try:
        observation = asyncio.run(first_observation())
    except TimeoutError:
        raise ValueError(
            f"the reset of task {task.task_id} took longer than env.turn_timeout_s={config.env.turn_timeout_s}; raise it"
        ) from None
    num_tokens = len(chat.encode_prompt(suite.system_prompt, observation))
    room = config.sampler.max_context_tokens - config.sampler.max_turn_tokens
    if num_tokens > room:
        raise ValueError(
            f"the first prompt of task {task.task_id} has {num_tokens} tokens, but sampler.max_context_tokens="
            f"{config.sampler.max_context_tokens} less sampler.max_turn_tokens={config.sampler.max_turn_tokens} leaves {room}; "
            f"raise max_context_tokens to {num_tokens + config.sampler.max_turn_tokens} at least, more for further turns"
        )
