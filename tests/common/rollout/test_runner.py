"""RolloutRunner on a real replica over the fake engine: whole batches of FrozenLake, repeatable to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from common.config import Config
from common.errors import EngineClosedError
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import TaskSuite, load_task_suite
from common.rollout.runner import EVALUATION_SEED_OFFSET, RolloutRunner
from common.rollout.tasks import PromptCursor
from common.serving.engine import StepPlan
from common.serving.fake import FakeEngine
from common.serving.fake_model import FakeWeights, make_weights
from common.serving.replica import LocalReplica
from common.transfer.publisher import Publisher
from common.transfer.staging import StagedUpdate
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from common.types import Request, Split, Trajectory

CONFIG = Config()
CONFIG.seed = 3
CONFIG.sampler.max_context_tokens = 128
CONFIG.grpo.prompts_per_step, CONFIG.grpo.group_size = 3, 4
SUITE = load_task_suite(CONFIG.env.factory, {"size": 3, "num_train": 20, "num_validation": 2, "num_held_out": 5})
CHAT = ChatTokenizer.from_vocabulary(SUITE.vocabulary())


class NotingEngine(FakeEngine):
    """Keeps the requests it was given, and can be made to break."""

    def __init__(self, weights: FakeWeights) -> None:
        super().__init__(weights, max_slots=8, max_context_tokens=128)
        self.requests: list[Request] = []
        self.is_broken = False

    def add(self, request: Request) -> None:
        self.requests.append(request)
        super().add(request)

    def submit(self, plan: StepPlan) -> None:
        if self.is_broken:
            raise RuntimeError("the device fell off the bus")
        super().submit(plan)


class EngineTarget(NumpyTarget):
    """Weights that arrive are committed to the engine."""

    def __init__(self, engine: FakeEngine, weights: dict[str, np.ndarray]) -> None:
        super().__init__(weights)
        self._engine, self._weights = engine, weights

    def apply(self, update: StagedUpdate) -> None:
        super().apply(update)
        self._engine.commit(self._weights, version=update.version)


@contextmanager
def running(suite: TaskSuite = SUITE, *, num_versions: int = 1) -> Iterator[tuple[RolloutRunner, NotingEngine]]:
    """A runner whose replica serves version 0 of as many as there are."""
    weights = make_weights(seed=0, vocab_size=CHAT.vocab_size)
    store = MemoryStore()
    publisher = Publisher(store)
    for version in range(num_versions):
        publisher.publish(version, make_weights(seed=version, vocab_size=CHAT.vocab_size)).result()
    engine = NotingEngine(weights)
    subscriber = Subscriber(store, EngineTarget(engine, weights), receiver_id="r0")
    replica = LocalReplica("r0", engine, subscriber, max_step_tokens=256)
    with RolloutRunner(CONFIG, suite, CHAT, replica) as runner:
        runner.sync_weights(0)
        yield runner, engine
    publisher.close()


def content(trajectory: Trajectory) -> tuple[object, ...]:
    return (
        trajectory.trajectory_id,
        trajectory.task.task_id,
        trajectory.token_ids.tobytes(),
        trajectory.behavior_logprobs.tobytes(),
        trajectory.reward,
    )


def test_a_step_is_the_next_prompts_with_a_full_group_each() -> None:
    seen: list[Trajectory] = []
    with running() as (runner, _):
        cursor = PromptCursor(SUITE, seed=CONFIG.seed)
        expected = PromptCursor(SUITE, seed=CONFIG.seed).take(6)
        groups = runner.collect(cursor, on_trajectory=seen.append) + runner.collect(cursor, on_trajectory=seen.append)
    assert [(group.group_id, group.task) for group in groups] == expected
    for group in groups:
        ids = [trajectory.trajectory_id for trajectory in group.trajectories]
        assert ids == [group.group_id * 4 + sample_idx for sample_idx in range(4)]
    assert sorted(map(content, seen)) == sorted(content(trajectory) for group in groups for trajectory in group.trajectories)


def test_the_same_prompts_and_weights_give_the_same_groups_whatever_was_played_before() -> None:
    def second_step(*, evaluate_between: bool, start_at: int) -> list[tuple[object, ...]]:
        with running() as (runner, _):
            cursor = PromptCursor(SUITE, seed=CONFIG.seed, num_taken=start_at)
            if start_at == 0:
                runner.collect(cursor)
            if evaluate_between:
                runner.evaluate(5, temperature=1.0)
            return [content(trajectory) for group in runner.collect(cursor) for trajectory in group.trajectories]

    in_one_go = second_step(evaluate_between=False, start_at=0)
    assert len(set(in_one_go)) == 12
    assert second_step(evaluate_between=True, start_at=0) == in_one_go
    assert second_step(evaluate_between=False, start_at=3) == in_one_go  # as after a resume


def test_an_evaluation_plays_the_first_held_out_tasks_in_order() -> None:
    with running() as (runner, _):
        trajectories = runner.evaluate(5, temperature=1.0)
        again = runner.evaluate(5, temperature=1.0)
        fewer = runner.evaluate(2, temperature=1.0)
    assert [trajectory.task for trajectory in trajectories] == [SUITE.task(Split.HELD_OUT, idx) for idx in range(5)]
    assert list(map(content, again)) == list(map(content, trajectories))
    assert list(map(content, fewer)) == list(map(content, trajectories[:2]))


def test_evaluations_and_rollouts_share_neither_draws_nor_cache() -> None:
    with running() as (runner, engine):
        runner.collect(PromptCursor(SUITE, seed=CONFIG.seed))
        num_rollout = len(engine.requests)
        runner.evaluate(5, temperature=0.0)
    rollouts, evaluations = engine.requests[:num_rollout], engine.requests[num_rollout:]
    assert {request.key.run_seed for request in rollouts} == {CONFIG.seed}
    assert {request.key.run_seed for request in evaluations} == {EVALUATION_SEED_OFFSET + CONFIG.seed}
    assert not {request.cache_namespace for request in rollouts} & {request.cache_namespace for request in evaluations}
    assert {request.sampling.temperature for request in rollouts} == {1.0}
    assert {request.sampling.temperature for request in evaluations} == {0.0}


def test_more_tasks_than_the_split_has_are_refused_with_both_numbers() -> None:
    with running() as (runner, engine):
        with pytest.raises(ValueError, match=r"^6 tasks to evaluate.* has 5;"):
            runner.evaluate(6, temperature=1.0)
        assert not engine.requests


def test_after_a_sync_every_token_carries_the_new_version() -> None:
    with running(num_versions=3) as (runner, _):
        before = runner.evaluate(3, temperature=1.0)
        runner.sync_weights(2)
        after = runner.evaluate(3, temperature=1.0)
    for trajectories, version in ((before, 0), (after, 2)):
        for trajectory in trajectories:
            assert set(trajectory.weight_versions[trajectory.loss_mask].tolist()) == {version}
    assert list(map(content, before)) != list(map(content, after))


def test_counters_are_those_of_the_newest_call() -> None:
    with running() as (runner, _):
        counts = []
        for num_tasks in (5, 2):
            trajectories = runner.evaluate(num_tasks, temperature=1.0)
            sampled = sum(int(trajectory.loss_mask.sum()) for trajectory in trajectories)
            assert runner.counters.sampled_tokens == sampled
            counts.append(sampled)
    assert counts[1] < counts[0]


def test_an_engine_that_breaks_ends_the_call_with_its_own_words() -> None:
    with running() as (runner, engine):
        engine.is_broken = True
        with pytest.raises(EngineClosedError, match="fell off the bus"):
            runner.collect(PromptCursor(SUITE, seed=CONFIG.seed))
