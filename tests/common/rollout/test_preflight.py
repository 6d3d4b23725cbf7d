"""What would stop a run after its warm-up is found before it, by the field that is wrong."""

from __future__ import annotations

import asyncio

import pytest

from common.config import Config
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Environment, TaskSuite, load_task_suite
from common.rollout.preflight import check_suite
from tests.common.rollout.fakes import FakeSuite, SlowResetEnvironment, word_chat


def frozen_lake(config: Config, **options: object) -> tuple[TaskSuite, ChatTokenizer]:
    sizes: dict[str, object] = {"size": 3, "num_train": 20, "num_validation": 2, "num_held_out": 5}
    suite = load_task_suite(config.env.factory, sizes | options)
    return suite, ChatTokenizer.from_vocabulary(suite.vocabulary())


def small_config() -> Config:
    config = Config()
    config.eval.num_tasks = 5
    return config


def test_a_suite_that_fits_passes() -> None:
    config = small_config()
    check_suite(config, *frozen_lake(config))


def test_more_held_out_tasks_than_there_are() -> None:
    config = small_config()
    config.eval.num_tasks = 6
    with pytest.raises(ValueError, match=r"^eval\.num_tasks=6 needs 6 held_out tasks, but .*FrozenLakeSuite has 5; lower"):
        check_suite(config, *frozen_lake(config))


def test_more_held_out_tasks_in_mid_run_than_there_are_unless_none_are_played() -> None:
    config = small_config()
    config.eval.num_tasks_in_run = 9
    check_suite(config, *frozen_lake(config))
    config.eval.interval = 2
    with pytest.raises(ValueError, match=r"^eval\.num_tasks_in_run=9 needs 9 held_out tasks"):
        check_suite(config, *frozen_lake(config))


def test_no_validation_tasks_unless_none_are_asked_for() -> None:
    config = small_config()
    with pytest.raises(ValueError, match=r"^warmup\.validation_interval=20 \(0 does without\) needs 1 validation tasks"):
        check_suite(config, *frozen_lake(config, num_validation=0))
    config.warmup.validation_interval = 0
    check_suite(config, *frozen_lake(config, num_validation=0))


def test_a_context_too_small_for_the_first_prompt_names_the_one_that_is_enough() -> None:
    config = small_config()
    suite, chat = frozen_lake(config)
    config.sampler.max_context_tokens = 12
    with pytest.raises(ValueError, match=r"first prompt of task frozen_lake/train/0 has (\d+) tokens.*raise") as caught:
        check_suite(config, suite, chat)
    enough = int(str(caught.value).split("raise max_context_tokens to ")[1].split()[0])
    config.sampler.max_context_tokens = enough - 1
    with pytest.raises(ValueError, match="first prompt"):
        check_suite(config, suite, chat)
    config.sampler.max_context_tokens = enough
    check_suite(config, suite, chat)


def test_a_warm_up_without_a_demonstrator() -> None:
    config = small_config()
    suite = FakeSuite(num_tasks=5)
    with pytest.raises(ValueError, match=r"warmup\.num_updates=180, but CountingEnvironment.*cannot demonstrate; set it to 0"):
        check_suite(config, suite, word_chat())
    config.warmup.num_updates = 0
    check_suite(config, suite, word_chat())


def test_a_reset_that_never_answers() -> None:
    config = small_config()
    config.warmup.num_updates = 0
    config.env.turn_timeout_s = 0.05
    with pytest.raises(ValueError, match=r"counter/train/0 took longer than env\.turn_timeout_s=0\.05; raise it"):
        check_suite(config, FakeSuite(SlowResetEnvironment, num_tasks=5), word_chat())


def test_no_turns() -> None:
    config = small_config()
    with pytest.raises(ValueError, match="max_turns=0; an episode needs at least 1"):
        check_suite(config, FakeSuite(max_turns=0, num_tasks=5), word_chat())


def test_every_environment_it_starts_is_closed() -> None:
    config = small_config()
    config.warmup.num_updates = 0
    suite = FakeSuite(num_tasks=5)
    check_suite(config, suite, word_chat())
    assert [environment.num_closed for environment in suite.environments] == [1] * 2  # type: ignore[attr-defined]


def test_an_environment_that_breaks_keeps_its_own_error() -> None:
    class Broken:
        async def reset(self, task: object) -> str:
            raise OSError("no licence for the simulator")

        async def step(self, action: str) -> object:
            raise AssertionError

        async def close(self) -> None:
            await asyncio.sleep(0)

    class BrokenSuite(FakeSuite):
        def make_environment(self) -> Environment:
            return Broken()  # type: ignore[return-value]

    config = small_config()
    config.warmup.num_updates = 0
    suite = BrokenSuite(num_tasks=5)
    with pytest.raises(OSError, match="no licence"):
        check_suite(config, suite, word_chat())
