"""Demonstrations for the supervised warm-up: episodes in which an expert, mixed with random actions, plays the agent's part.

They are played by `run_episode` itself with a sampler that asks the environment's expert, so their tokens lie exactly as those of
a rollout. The random actions are imitated too, on purpose: the policy comes out noisy, which leaves reinforcement learning
something to explore. Log-probabilities and weight versions of the agent's tokens are 0 here and mean nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from common.config import Config
from common.errors import RolloutError
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Demonstrator, Environment, TaskSuite
from common.rollout.tasks import PromptCursor
from common.rollout.worker import run_episode
from common.types import Completion, EpisodeEnd, FinishReason, Request, SamplingParams, Split, Task, Trajectory


@dataclasses.dataclass(kw_only=True)
class _Expert:
    """A suite of one environment and the sampler that plays it: the sampler must see the state its environment is in."""

    suite: TaskSuite
    chat: ChatTokenizer
    rng: np.random.Generator
    random_action_share: float
    environment: Environment
    demonstrator: Demonstrator
    """The same object as `environment`."""

    @property
    def system_prompt(self) -> str | None:
        return self.suite.system_prompt

    @property
    def max_turns(self) -> int:
        return self.suite.max_turns

    def num_tasks(self, split: Split) -> int:
        return self.suite.num_tasks(split)

    def task(self, split: Split, task_idx: int) -> Task:
        return self.suite.task(split, task_idx)

    def make_environment(self) -> Environment:
        return self.environment

    def vocabulary(self) -> Sequence[str]:
        return self.suite.vocabulary()

    async def generate(self, request: Request) -> Completion:
        is_random = self.rng.random() < self.random_action_share
        action = self.demonstrator.random_action(self.rng) if is_random else self.demonstrator.expert_action()
        token_ids = tuple(self.chat.encode_turn(action))
        if len(token_ids) > request.sampling.max_tokens:
            raise ValueError(
                f"the expert's action {action!r} takes {len(token_ids)} tokens with its end of turn, above "
                f"max_turn_tokens={request.sampling.max_tokens}; raise sampler.max_turn_tokens"
            )
        return Completion(
            request_id=request.request_id,
            token_ids=token_ids,
            behavior_logprobs=(0.0,) * len(token_ids),
            weight_versions=(0,) * len(token_ids),
            finish_reason=FinishReason.STOP,
        )


async def demonstrate(
    suite: TaskSuite,
    task: Task,
    chat: ChatTokenizer,
    rng: np.random.Generator,
    random_action_share: float,
    *,
    max_context_tokens: int,
    max_turn_tokens: int,
    turn_timeout_s: float = 60.0,
) -> Trajectory:
    """Play one task with the expert, each action random with probability `random_action_share`.

    Raises:
        ValueError: the suite's environment is no Demonstrator.
        RolloutError: the environment failed.
    """
    environment = suite.make_environment()
    if not isinstance(environment, Demonstrator):
        raise ValueError(
            f"{type(environment).__name__} of {type(suite).__name__} cannot demonstrate: set warmup.num_updates=0, or give it "
            "expert_action and random_action (common.rollout.environment.Demonstrator)"
        )
    expert = _Expert(
        suite=suite,
        chat=chat,
        rng=rng,
        random_action_share=random_action_share,
        environment=environment,
        demonstrator=environment,
    )
    trajectory = await run_episode(
        suite=expert,
        task=task,
        chat=chat,
        sampler=expert,
        sampling=SamplingParams(max_tokens=max_turn_tokens),
        run_seed=0,
        trajectory_id=0,
        group_id=0,
        max_context_tokens=max_context_tokens,
        turn_timeout_s=turn_timeout_s,
    )
    if trajectory.end is EpisodeEnd.FAILED:
        raise RolloutError(f"the demonstration of task {task.task_id} failed: {trajectory.error}")
    return trajectory


class WarmupDemonstrations:
    """The demonstrations of a run's warm-up: a batch for each update, drawn from (run seed, update), and a fixed validation set.

    Blocks; call it where no event loop runs.
    """

    def __init__(self, config: Config, suite: TaskSuite, chat: ChatTokenizer) -> None:
        self._config, self._suite, self._chat = config, suite, chat

    def batch(self, update_idx: int) -> list[Trajectory]:
        """`warmup.batch_size` demonstrations of training tasks: each epoch of prompts plays every task once."""
        batch_size = self._config.warmup.batch_size
        cursor = PromptCursor(self._suite, seed=self._config.seed, num_taken=update_idx * batch_size)
        return self._play([task for _, task in cursor.take(batch_size)], draw=(self._config.seed, update_idx))

    def validation(self) -> list[Trajectory]:
        """One demonstration of each of the first `warmup.num_validation_tasks` validation tasks, whatever the run's seed."""
        num_tasks = min(self._config.warmup.num_validation_tasks, self._suite.num_tasks(Split.VALIDATION))
        return self._play([self._suite.task(Split.VALIDATION, task_idx) for task_idx in range(num_tasks)], draw=())

    def _play(self, tasks: Sequence[Task], draw: tuple[int, ...]) -> list[Trajectory]:
        async def play_all() -> list[Trajectory]:
            return [
                await demonstrate(
                    self._suite,
                    task,
                    self._chat,
                    np.random.default_rng([*draw, task_idx]),
                    self._config.warmup.random_action_share,
                    max_context_tokens=self._config.sampler.max_context_tokens,
                    max_turn_tokens=self._config.sampler.max_turn_tokens,
                )
                for task_idx, task in enumerate(tasks)
            ]

        return asyncio.run(play_all())
