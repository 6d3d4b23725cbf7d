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

from common.errors import RolloutError
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Demonstrator, Environment, TaskSuite
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
        assert isinstance(self.environment, Demonstrator)
        is_random = self.rng.random() < self.random_action_share
        action = self.environment.random_action(self.rng) if is_random else self.environment.expert_action()
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
    expert = _Expert(suite=suite, chat=chat, rng=rng, random_action_share=random_action_share, environment=environment)
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


def demonstrate_all(
    suite: TaskSuite,
    tasks: Sequence[Task],
    chat: ChatTokenizer,
    *,
    seed: int,
    random_action_share: float,
    max_context_tokens: int,
    max_turn_tokens: int,
) -> list[Trajectory]:
    """One demonstration per task, one after the other, each with its own random numbers from (seed, place in `tasks`).

    Blocks; call it where no event loop runs.
    """

    async def play_all() -> list[Trajectory]:
        return [
            await demonstrate(
                suite,
                task,
                chat,
                np.random.default_rng([seed, task_idx]),
                random_action_share,
                max_context_tokens=max_context_tokens,
                max_turn_tokens=max_turn_tokens,
            )
            for task_idx, task in enumerate(tasks)
        ]

    return asyncio.run(play_all())
