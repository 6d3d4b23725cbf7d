"""RolloutRunner: plays whole batches of episodes on a replica, for code that waits for them.

Synchronous on purpose: the learner's loop reads from top to bottom. Between two calls the replica holds no work and makes no
progress. Results depend on the prompts, the weights and the run's seed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from common.config import Config
from common.rollout.buffer import GroupBuffer
from common.rollout.chat import ChatTokenizer
from common.rollout.collector import PlayEpisode, collect_groups
from common.rollout.environment import TaskSuite
from common.rollout.tasks import PromptCursor
from common.rollout.worker import run_episode
from common.serving.loop import LoopCounters
from common.serving.replica import Replica, StageReport
from common.types import Group, SamplingParams, Split, Trajectory

ResultT = TypeVar("ResultT")


class RunningReplica(Replica, AbstractAsyncContextManager["RunningReplica"], Protocol):
    """A replica that runs while it is entered."""

    @property
    def counters(self) -> LoopCounters: ...

    @property
    def counters_by_replica(self) -> dict[str, LoopCounters]:
        """The same for each replica of which it is made."""
        ...

    async def update_counters(self) -> None:
        """Bring both up to date, where that takes asking. Never raises for a replica that does not answer."""
        ...


OnTrajectory = Callable[[Trajectory], None]

TRAINING, EVALUATION = "train", "evaluation"
"""Cache namespaces. What an evaluation leaves in the cache must not change how rollouts are computed: a run that is resumed behind
the evaluation would differ in the last bit."""

EVALUATION_SEED_OFFSET = 2**31
"""Keeps the draws of evaluations apart from those of training, whose run_seed lies below it."""


class RolloutRunner:
    """Use as a context manager: the replica runs from its beginning to its end, and makes progress only within the calls below."""

    def __init__(self, config: Config, suite: TaskSuite, chat: ChatTokenizer, replica: RunningReplica) -> None:
        self._config, self._suite, self._chat, self._replica = config, suite, chat, replica
        self._event_loop = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self.buffer = GroupBuffer(group_size=config.grpo.group_size)
        self.counters = replica.counters
        """What the replica computed in the newest call."""
        self.counters_by_replica = replica.counters_by_replica

    def __enter__(self) -> RolloutRunner:
        self._event_loop.run(self._stack.enter_async_context(self._replica))
        return self

    def __exit__(self, *exc: object) -> None:
        self._event_loop.run(self._stack.aclose())
        self._event_loop.close()

    def sync_weights(self, version: int) -> StageReport:
        """Stage a published version and commit it.

        Raises:
            TransferError: the replica serves the version it had.
        """

        async def stage_and_commit() -> StageReport:
            report = await self._replica.stage(version)
            await self._replica.commit()
            return report

        return self._event_loop.run(stage_and_commit())

    def collect(self, cursor: PromptCursor, on_trajectory: OnTrajectory | None = None) -> list[Group]:
        """The groups of one learner step, `grpo.prompts_per_step` of them, in order of their ids.

        Raises:
            RolloutError: episodes keep failing; nothing was trained on, the same step can be tried again.
            EngineClosedError: the engine failed.
        """
        grpo = self._config.grpo

        async def collect(play: PlayEpisode) -> list[Group]:
            return await collect_groups(
                cursor.take(grpo.prompts_per_step),
                play=play,
                group_size=grpo.group_size,
                cursor=cursor,
                dynamic_sampling=grpo.dynamic_sampling,
                max_refills=grpo.max_refills,
                buffer=self.buffer,
                on_trajectory=on_trajectory,
            )

        return self._run(collect, namespace=TRAINING, temperature=self._config.sampler.temperature, run_seed=self._config.seed)

    def evaluate(
        self, num_tasks: int, *, temperature: float, split: Split = Split.HELD_OUT, on_trajectory: OnTrajectory | None = None
    ) -> list[Trajectory]:
        """One episode on each of the first `num_tasks` tasks of a split, in their order.

        Raises:
            ValueError: the split has fewer tasks.
        """
        if num_tasks > self._suite.num_tasks(split):
            raise ValueError(
                f"{num_tasks} tasks to evaluate, but split {split.value} of {self._config.env.factory} has "
                f"{self._suite.num_tasks(split)}; lower eval.num_tasks or give the suite more"
            )

        async def play_all(play: PlayEpisode) -> list[Trajectory]:
            async def play_one(task_idx: int) -> Trajectory:
                trajectory = await play(task=self._suite.task(split, task_idx), trajectory_id=task_idx, group_id=task_idx)
                if on_trajectory is not None:
                    on_trajectory(trajectory)
                return trajectory

            return await asyncio.gather(*(play_one(task_idx) for task_idx in range(num_tasks)))

        return self._run(
            play_all, namespace=EVALUATION, temperature=temperature, run_seed=EVALUATION_SEED_OFFSET + self._config.seed
        )

    def _run(
        self, work: Callable[[PlayEpisode], Coroutine[Any, Any, ResultT]], *, namespace: str, temperature: float, run_seed: int
    ) -> ResultT:
        sampler_config = self._config.sampler
        play = functools.partial(
            run_episode,
            suite=self._suite,
            chat=self._chat,
            sampler=self._replica,
            sampling=SamplingParams(max_tokens=sampler_config.max_turn_tokens, temperature=temperature),
            run_seed=run_seed,
            max_context_tokens=sampler_config.max_context_tokens,
            turn_timeout_s=self._config.env.turn_timeout_s,
            cache_namespace=namespace,
        )
        before = dataclasses.replace(self._replica.counters)
        before_by_replica = {name: dataclasses.replace(each) for name, each in self._replica.counters_by_replica.items()}

        async def work_and_count() -> ResultT:
            try:
                return await work(play)
            finally:
                await self._replica.update_counters()

        try:
            return self._event_loop.run(work_and_count())
        finally:
            self.counters = self._replica.counters.since(before)
            by_replica = self._replica.counters_by_replica
            self.counters_by_replica = {name: each.since(before_by_replica[name]) for name, each in by_replica.items()}
