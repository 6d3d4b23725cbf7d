"""One episode: which tokens carry loss, and that every way to end is told apart and closes the environment."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.errors import EngineClosedError, RequestRejectedError
from common.rollout import worker
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Environment, StepOutcome
from common.types import Completion, EpisodeEnd, FinishReason, Request, Task, Trajectory
from tests.common.rollout.fakes import (
    CountingEnvironment,
    FakeSuite,
    RaisingEnvironment,
    ScriptedSampler,
    SlowEnvironment,
    SlowResetEnvironment,
    StubbornEnvironment,
    episode,
    word_chat,
    write_chatml_folder,
)

SHORT_TIMEOUT_S = 0.02


def turns_of(chat: ChatTokenizer, *actions: str) -> list[list[int]]:
    return [chat.encode_turn(action) for action in actions]


def test_loss_mask_is_true_on_exactly_the_sampled_tokens() -> None:
    chat = word_chat()
    sampler = ScriptedSampler(turns_of(chat, "go", "stay stay", "finish"))
    trajectory = asyncio.run(episode(FakeSuite(), sampler, chat))
    sampled = [token_id for turn in sampler.turns for token_id in turn]
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == sampled
    assert trajectory.weight_versions[trajectory.loss_mask].tolist() == [1, 1, 2, 2, 2, 3, 3]
    assert trajectory.behavior_logprobs[trajectory.loss_mask].tolist() == [-0.5, -1.5, -0.5, -1.5, -2.5, -0.5, -1.5]
    for given in (trajectory.weight_versions[~trajectory.loss_mask], trajectory.behavior_logprobs[~trajectory.loss_mask]):
        assert not given.any()
    assert (trajectory.end, trajectory.reward, trajectory.success, trajectory.error) == (EpisodeEnd.DONE, 1.0, True, None)
    spans = [trajectory.token_ids[turn.start_token_idx : turn.end_token_idx].tolist() for turn in trajectory.turns]
    assert spans == [list(turn) for turn in sampler.turns]
    assert [turn.observation for turn in trajectory.turns] == ["start", "more", "more"]


def test_agent_tokens_are_never_retokenized(tmp_path: Path) -> None:
    chat = ChatTokenizer.load(write_chatml_folder(tmp_path))
    spelled_out = [chat.encode_turn(letter)[0] for letter in "go"]
    assert chat.encode_turn("go")[:-1] != spelled_out, "the law needs two encodings of one text"
    end = chat.stop_token_ids[0]
    sampler = ScriptedSampler([[*spelled_out, end], [*spelled_out, *spelled_out, end], chat.encode_turn("finish")])
    suite = FakeSuite()
    trajectory = asyncio.run(episode(suite, sampler, chat, max_tokens=8))
    assert suite.environments[0].actions == ["go", "gogo", "finish"]
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == [token_id for turn in sampler.turns for token_id in turn]
    whole = tuple(trajectory.token_ids.tolist())
    for request in sampler.requests:
        assert request.prompt_token_ids == whole[: len(request.prompt_token_ids)], "a prompt is what was sampled before, id for id"


def test_a_turn_cut_by_length_is_ended_by_a_token_without_loss() -> None:
    chat = word_chat()
    cut = [chat.encode_turn("go stay")[:-1], chat.encode_turn("finish")]
    trajectory = asyncio.run(episode(FakeSuite(), ScriptedSampler(cut), chat, max_tokens=2))
    whole = asyncio.run(episode(FakeSuite(), ScriptedSampler(turns_of(chat, "go stay", "finish")), chat))
    assert trajectory.token_ids.tolist() == whole.token_ids.tolist()
    end_idx = trajectory.turns[0].end_token_idx
    assert trajectory.token_ids[end_idx] == chat.stop_token_ids[0]
    assert (bool(trajectory.loss_mask[end_idx]), bool(whole.loss_mask[end_idx])) == (False, True)


def test_requests_are_keyed_by_run_trajectory_and_turn_and_stop_at_the_end_of_turn() -> None:
    chat = word_chat()
    sampler = ScriptedSampler(turns_of(chat, "go", "finish"))
    asyncio.run(episode(FakeSuite(), sampler, chat, trajectory_id=41))
    assert [request.request_id for request in sampler.requests] == ["t41.0", "t41.1"]
    assert [(r.key.run_seed, r.key.trajectory_id, r.key.turn_idx) for r in sampler.requests] == [(3, 41, 0), (3, 41, 1)]
    assert all(request.sampling.stop_token_ids == chat.stop_token_ids for request in sampler.requests)


def test_the_system_prompt_is_said_once() -> None:
    chat = word_chat()
    suite = FakeSuite()
    suite.system_prompt = "stay again"
    trajectory = asyncio.run(episode(suite, ScriptedSampler(turns_of(chat, "go", "finish")), chat))
    prompt = chat.encode_prompt("stay again", "start")
    assert trajectory.token_ids[: len(prompt)].tolist() == prompt
    assert trajectory.token_ids.tolist().count(prompt[0]) == 1


def test_the_turn_cap_ends_an_episode_with_the_agents_last_token() -> None:
    chat = word_chat()
    trajectory = asyncio.run(episode(FakeSuite(max_turns=3), ScriptedSampler(turns_of(chat, "go", "go", "go", "finish")), chat))
    assert (trajectory.end, len(trajectory.turns), trajectory.success) == (EpisodeEnd.TURN_CAP, 3, False)
    assert trajectory.loss_mask[-1]


@pytest.mark.parametrize(("room", "end"), [(0, EpisodeEnd.DONE), (-1, EpisodeEnd.CONTEXT_FULL)])
def test_a_turn_that_could_exceed_the_context_is_not_begun(room: int, end: EpisodeEnd) -> None:
    chat = word_chat()
    sampler = ScriptedSampler(turns_of(chat, "go", "finish"))
    prompt_tokens = len(chat.encode_prompt(None, "start")) + 2 + len(chat.encode_observation("more", previous_turn_ended=True))
    trajectory = asyncio.run(episode(FakeSuite(), sampler, chat, max_tokens=4, max_context_tokens=prompt_tokens + 4 + room))
    assert trajectory.end is end
    assert trajectory.loss_mask[-1]
    assert len(trajectory.turns) == (2 if end is EpisodeEnd.DONE else 1)


def test_a_first_prompt_that_does_not_fit_fails_with_both_numbers() -> None:
    chat = word_chat()
    trajectory = asyncio.run(episode(FakeSuite(), ScriptedSampler([]), chat, max_tokens=4, max_context_tokens=6))
    assert trajectory.end is EpisodeEnd.FAILED
    assert trajectory.error is not None
    assert "has 3 tokens" in trajectory.error
    assert "max_context_tokens=6" in trajectory.error


class PayingEnvironment(CountingEnvironment):
    async def step(self, action: str) -> StepOutcome:
        return StepOutcome(observation="more", reward=0.25 if action == "go" else -1.0, done=False)


def test_rewards_add_up_over_turns() -> None:
    chat = word_chat()
    sampler = ScriptedSampler(turns_of(chat, "go", "stay", "go"))
    trajectory = asyncio.run(episode(FakeSuite(PayingEnvironment, max_turns=3), sampler, chat))
    assert [turn.reward for turn in trajectory.turns] == [0.25, -1.0, 0.25]
    assert trajectory.reward == -0.5


class WrongAnswerEnvironment(CountingEnvironment):
    async def step(self, action: str) -> StepOutcome:
        return "more"  # type: ignore[return-value]


class WrongResetEnvironment(CountingEnvironment):
    async def reset(self, task: Task) -> str:
        return None  # type: ignore[return-value]


class NanRewardEnvironment(CountingEnvironment):
    async def step(self, action: str) -> StepOutcome:
        return StepOutcome(observation="more", reward=float("nan"), done=False)


class BlockingSignatureEnvironment(CountingEnvironment):
    def step(self, action: str) -> StepOutcome:  # type: ignore[override]
        raise LookupError("not even a coroutine")


class UnawaitableEnvironment(CountingEnvironment):
    def step(self, action: str) -> StepOutcome:  # type: ignore[override]
        return StepOutcome(observation="more", reward=0.0, done=False)


@pytest.mark.parametrize(
    ("environment_class", "words"),
    [
        (RaisingEnvironment, ["step with action 'go'", "RuntimeError", "the simulator lost its connection"]),
        (WrongAnswerEnvironment, ["step with action 'go'", "returned str, not StepOutcome"]),
        (WrongResetEnvironment, ["reset", "returned NoneType, not str"]),
        (NanRewardEnvironment, ["step with action 'go'", "reward nan"]),
        (BlockingSignatureEnvironment, ["LookupError", "not even a coroutine"]),
        (UnawaitableEnvironment, ["step with action 'go'", "TypeError"]),
    ],
)
def test_a_broken_environment_fails_its_own_episode_with_its_text(
    environment_class: Callable[[], Environment], words: list[str]
) -> None:
    chat = word_chat()
    broken, sound = FakeSuite(environment_class), FakeSuite()
    sampler = ScriptedSampler(turns_of(chat, "go", "finish"))

    async def play_both() -> None:
        failed, done = await asyncio.gather(episode(broken, sampler, chat), episode(sound, sampler, chat))
        assert failed.end is EpisodeEnd.FAILED
        assert all(word in (failed.error or "") for word in words), failed.error
        assert (done.end, done.error) == (EpisodeEnd.DONE, None)

    asyncio.run(play_both())
    assert broken.environments[0].num_closed == sound.environments[0].num_closed == 1


def test_a_suite_that_cannot_make_an_environment_fails_the_episode() -> None:
    def make() -> Environment:
        raise OSError("no display")

    trajectory = asyncio.run(episode(FakeSuite(make), ScriptedSampler([]), word_chat()))
    assert (trajectory.end, trajectory.error) == (EpisodeEnd.FAILED, "make_environment raised OSError: no display")


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORTED])
def test_a_failed_generation_fails_its_episode_with_the_engines_text(reason: FinishReason) -> None:
    chat = word_chat()
    suite = FakeSuite()
    trajectory = asyncio.run(episode(suite, ScriptedSampler(turns_of(chat, "go"), finish_reason=reason), chat))
    assert trajectory.end is EpisodeEnd.FAILED
    assert (trajectory.error or "").startswith(f"request t7.0 ended with {reason.value}")
    assert ("the device is gone" in (trajectory.error or "")) == (reason is FinishReason.ERROR)
    assert suite.environments[0].num_closed == 1


class RefusingSampler:
    def __init__(self, error: Exception) -> None:
        self.error = error

    async def generate(self, request: Request) -> Completion:
        raise self.error


def test_a_rejected_request_fails_its_episode_but_a_closed_engine_ends_the_run() -> None:
    suite = FakeSuite()
    trajectory = asyncio.run(episode(suite, RefusingSampler(RequestRejectedError("512 tokens are too many")), word_chat()))
    assert trajectory.error == "request t7.0 was rejected: 512 tokens are too many"
    with pytest.raises(EngineClosedError):
        asyncio.run(episode(suite, RefusingSampler(EngineClosedError("closed")), word_chat()))
    assert [environment.num_closed for environment in suite.environments] == [1, 1]


def test_an_environment_that_takes_too_long_ends_its_episode_and_is_cancelled_and_closed() -> None:
    chat = word_chat()
    suite = FakeSuite(SlowEnvironment)

    async def play() -> Trajectory:
        trajectory = await episode(suite, ScriptedSampler(turns_of(chat, "go")), chat, turn_timeout_s=SHORT_TIMEOUT_S)
        await asyncio.wait_for(suite.environments[0].step_ended.wait(), timeout=5)
        return trajectory

    trajectory = asyncio.run(play())
    assert (trajectory.end, trajectory.error, trajectory.reward) == (EpisodeEnd.TURN_TIMEOUT, None, 0.0)
    assert trajectory.loss_mask[-1]
    assert [turn.action for turn in trajectory.turns] == ["go"]
    assert suite.environments[0].num_closed == 1


def test_a_reset_that_takes_too_long_leaves_nothing_to_learn_from_and_fails() -> None:
    suite = FakeSuite(SlowResetEnvironment)
    trajectory = asyncio.run(episode(suite, ScriptedSampler([]), word_chat(), turn_timeout_s=SHORT_TIMEOUT_S))
    assert trajectory.end is EpisodeEnd.FAILED
    assert "reset took longer than 0.02 s" in (trajectory.error or "")
    assert suite.environments[0].num_closed == 1


def test_an_environment_that_ignores_cancellation_holds_up_neither_its_episode_nor_the_end_of_the_loop() -> None:
    chat = word_chat()
    suite = FakeSuite(StubbornEnvironment)

    trajectory = asyncio.run(episode(suite, ScriptedSampler(turns_of(chat, "go")), chat, turn_timeout_s=SHORT_TIMEOUT_S))
    assert (trajectory.end, trajectory.reward) == (EpisodeEnd.TURN_TIMEOUT, 0.0)
    assert suite.environments[0].num_closed == 1


class StuckInCloseEnvironment(CountingEnvironment):
    async def close(self) -> None:
        await asyncio.Event().wait()


class RaisingInCloseEnvironment(CountingEnvironment):
    async def close(self) -> None:
        raise OSError("already gone")


@pytest.mark.parametrize(
    ("environment_class", "text"), [(StuckInCloseEnvironment, "took longer"), (RaisingInCloseEnvironment, "already gone")]
)
def test_an_environment_that_does_not_close_costs_no_trajectory(
    environment_class: Callable[[], Environment], text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "CLOSE_TIMEOUT_S", SHORT_TIMEOUT_S)
    chat = word_chat()
    with caplog.at_level(logging.WARNING):
        trajectory = asyncio.run(episode(FakeSuite(environment_class), ScriptedSampler(turns_of(chat, "finish")), chat))
    assert trajectory.end is EpisodeEnd.DONE
    assert text in caplog.text


def test_a_cancelled_episode_ends_its_step_and_closes_its_environment() -> None:
    chat = word_chat()
    suite = FakeSuite(SlowEnvironment)

    async def play_and_cancel() -> None:
        playing = asyncio.ensure_future(episode(suite, ScriptedSampler(turns_of(chat, "go")), chat))
        while not (suite.environments and suite.environments[0].actions):
            await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.wait_for(suite.environments[0].step_ended.wait(), timeout=5)

    asyncio.run(play_and_cancel())
    assert suite.environments[0].num_closed == 1


def test_an_empty_turn_is_an_action_like_any_other() -> None:
    chat = word_chat()
    suite = FakeSuite()
    trajectory = asyncio.run(episode(suite, ScriptedSampler([[], chat.encode_turn("finish")]), chat))
    assert suite.environments[0].actions == ["", "finish"]
    assert np.count_nonzero(trajectory.loss_mask) == 2
