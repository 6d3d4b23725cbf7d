"""Demonstrations lie in tokens exactly as rollouts do."""

import asyncio

import numpy as np
import pytest

from common.config import Config
from common.errors import RolloutError
from common.rollout.chat import ChatTokenizer
from common.rollout.demonstrations import WarmupDemonstrations, demonstrate
from common.rollout.envs.frozen_lake import FrozenLakeSuite
from common.types import EpisodeEnd, Split, Trajectory
from tests.common.rollout.fakes import TASK, CountingEnvironment, FakeSuite, RaisingEnvironment, ScriptedSampler, episode, word_chat

SUITE = FrozenLakeSuite()
CHAT = ChatTokenizer.from_vocabulary(SUITE.vocabulary())


def demonstrations(share: float, *, seed: int = 0) -> WarmupDemonstrations:
    config = Config(seed=seed)
    config.warmup.random_action_share = share
    return WarmupDemonstrations(config, SUITE, CHAT)


def test_a_sampler_that_replays_the_actions_gives_identical_tokens_and_mask() -> None:
    for demonstration in demonstrations(0.5).batch(0)[:20]:
        turns = [CHAT.encode_turn(turn.action) for turn in demonstration.turns]
        replayed = asyncio.run(
            episode(SUITE, ScriptedSampler(turns), CHAT, task=demonstration.task, max_tokens=2, max_context_tokens=300)
        )
        assert demonstration.token_ids.tolist() == replayed.token_ids.tolist()
        assert demonstration.loss_mask.tolist() == replayed.loss_mask.tolist()
        assert (demonstration.end, demonstration.turns) == (replayed.end, replayed.turns)


def test_the_expert_alone_always_succeeds() -> None:
    assert all(demonstration.success and len(demonstration.turns) == 6 for demonstration in demonstrations(0.0).batch(0))


def test_random_actions_are_mixed_in_and_imitated() -> None:
    noisy = demonstrations(0.5).batch(0)
    assert 0.1 < np.mean([demonstration.success for demonstration in noisy]) < 0.9
    for demonstration in noisy:
        assert demonstration.loss_mask.sum() == 2 * len(demonstration.turns), (
            "each turn is one word and its end, all of them learned"
        )


def token_ids_of(trajectories: list[Trajectory]) -> list[list[int]]:
    return [trajectory.token_ids.tolist() for trajectory in trajectories]


def test_a_batch_depends_on_seed_and_update_alone() -> None:
    first, again = demonstrations(0.5), demonstrations(0.5)
    first.batch(0)
    assert token_ids_of(first.batch(1)) == token_ids_of(again.batch(1))
    assert token_ids_of(first.batch(1)) != token_ids_of(first.batch(2))
    assert token_ids_of(first.batch(1)) != token_ids_of(demonstrations(0.5, seed=1).batch(1))


def test_validation_demonstrations_are_the_same_for_every_run_and_of_no_training_task() -> None:
    validation = demonstrations(0.5).validation()
    assert token_ids_of(validation) == token_ids_of(demonstrations(0.5, seed=1).validation())
    assert {trajectory.task.split for trajectory in validation} == {Split.VALIDATION}
    assert {trajectory.task.split for trajectory in demonstrations(0.5).batch(0)} == {Split.TRAIN}


def run_one(suite: FakeSuite, *, max_turn_tokens: int = 4) -> Trajectory:
    rng = np.random.default_rng(0)
    return asyncio.run(demonstrate(suite, TASK, word_chat(), rng, 0.0, max_context_tokens=100, max_turn_tokens=max_turn_tokens))


class PatientExpert(CountingEnvironment):
    def expert_action(self) -> str:
        return "finish" if len(self.actions) == 2 else "stay stay"

    def random_action(self, rng: np.random.Generator) -> str:
        return "go"


def test_a_users_own_demonstrator_is_played() -> None:
    trajectory = run_one(FakeSuite(PatientExpert))
    assert (trajectory.end, [turn.action for turn in trajectory.turns]) == (EpisodeEnd.DONE, ["stay stay", "stay stay", "finish"])


def test_an_environment_that_cannot_demonstrate_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"CountingEnvironment of FakeSuite .* warmup.num_updates=0"):
        run_one(FakeSuite())


def test_an_expert_that_says_more_than_a_turn_may_hold_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"'stay stay' takes 3 tokens .* max_turn_tokens=2"):
        run_one(FakeSuite(PatientExpert), max_turn_tokens=2)


def test_a_demonstration_that_fails_raises_the_environments_text() -> None:
    class BrokenExpert(RaisingEnvironment, PatientExpert):
        pass

    with pytest.raises(RolloutError, match=r"counter/train/0 .* the simulator lost its connection"):
        run_one(FakeSuite(BrokenExpert))
