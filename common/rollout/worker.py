"""One episode, turn by turn: prompt, sampled turn, environment, observation, ... until something ends it.

Token ids are concatenated and what was sampled is never encoded again. `loss_mask` is true on exactly the sampled tokens. A
trajectory always ends with a token of the agent: the observation after its last turn is left out.

An environment that raises, answers wrongly or takes too long ends its own episode and no other. One that ignores being cancelled
is left behind, not waited for. What cannot be cut short is an environment that blocks the event loop itself (time.sleep in an
async method): environments wait with await. Nothing here is ordered by the clock: given the same completions, the same trajectory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from common.errors import RequestRejectedError
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Environment, StepOutcome, TaskSuite
from common.types import Completion, EpisodeEnd, FinishReason, Request, SamplingKey, SamplingParams, Task, Trajectory, Turn

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

CLOSE_TIMEOUT_S = 5.0  # an environment that does not close in this time is left behind, or its episode would never end


class Sampler(Protocol):
    """What generates turns: an engine behind a loop, a router over replicas, a script in tests."""

    async def generate(self, request: Request) -> Completion:
        """Return the request's one completion. A failed generation is a Completion with FinishReason.ERROR.

        Raises:
            RequestRejectedError: this request can never run; others are not affected.
            EngineClosedError: nothing will run any more.
        """
        ...


class _EpisodeFailedError(Exception):
    """Ends an episode with EpisodeEnd.FAILED; the text becomes Trajectory.error."""


class _TurnTimeoutError(Exception):
    """The environment did not answer in time."""


@dataclasses.dataclass(kw_only=True)
class _Record:
    """The trajectory while it grows; the lists with one entry per token have equal lengths."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    loss_mask: list[bool] = dataclasses.field(default_factory=list)
    behavior_logprobs: list[float] = dataclasses.field(default_factory=list)
    weight_versions: list[int] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    success: bool = False

    def append_given(self, token_ids: list[int]) -> None:
        """Tokens the agent did not write."""
        self.token_ids += token_ids
        self.loss_mask += [False] * len(token_ids)
        self.behavior_logprobs += [0.0] * len(token_ids)
        self.weight_versions += [0] * len(token_ids)

    def append_sampled(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.loss_mask += [True] * len(completion.token_ids)
        self.behavior_logprobs += completion.behavior_logprobs
        self.weight_versions += completion.weight_versions


async def run_episode(
    *,
    suite: TaskSuite,
    task: Task,
    chat: ChatTokenizer,
    sampler: Sampler,
    sampling: SamplingParams,
    run_seed: int,
    trajectory_id: int,
    group_id: int,
    max_context_tokens: int,
    turn_timeout_s: float,
    cache_namespace: str = "",
) -> Trajectory:
    """Play one task to its end. Failures end up in the trajectory; only what concerns every episode is raised.

    Args:
        sampling: its stop tokens are added to those that end the agent's turn.
        max_context_tokens: the episode ends before a turn whose prompt and `sampling.max_tokens` exceed it together.
        turn_timeout_s: limit on each reset and each step of the environment.
    """
    record = _Record()
    error: str | None = None
    environment: Environment | None = None
    try:
        environment = _make_environment(suite)
        episode = _Episode(
            environment=environment,
            chat=chat,
            sampler=sampler,
            sampling=dataclasses.replace(
                sampling, stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *chat.stop_token_ids)))
            ),
            run_seed=run_seed,
            trajectory_id=trajectory_id,
            max_context_tokens=max_context_tokens,
            turn_timeout_s=turn_timeout_s,
            cache_namespace=cache_namespace,
            record=record,
        )
        end = await episode.play(task, system_prompt=suite.system_prompt, max_turns=suite.max_turns)
    except _EpisodeFailedError as failure:
        end, error = EpisodeEnd.FAILED, str(failure)
    finally:
        if environment is not None:
            await _close(environment)
    return Trajectory(
        trajectory_id=trajectory_id,
        group_id=group_id,
        task=task,
        token_ids=np.array(record.token_ids, dtype=np.int32),
        loss_mask=np.array(record.loss_mask, dtype=np.bool_),
        behavior_logprobs=np.array(record.behavior_logprobs, dtype=np.float32),
        weight_versions=np.array(record.weight_versions, dtype=np.int32),
        reward=record.reward,
        success=record.success,
        end=end,
        turns=tuple(record.turns),
        error=error,
    )


@dataclasses.dataclass(kw_only=True)
class _Episode:
    """The loop of one episode; writes into `record`."""

    environment: Environment
    chat: ChatTokenizer
    sampler: Sampler
    sampling: SamplingParams
    run_seed: int
    trajectory_id: int
    max_context_tokens: int
    turn_timeout_s: float
    cache_namespace: str
    record: _Record

    async def play(self, task: Task, *, system_prompt: str | None, max_turns: int) -> EpisodeEnd:
        try:
            observation = await self._ask(lambda: self.environment.reset(task), str, "reset")
        except _TurnTimeoutError as timeout:
            raise _EpisodeFailedError(str(timeout)) from timeout  # without a token of the agent there is nothing to learn from
        given = self.chat.encode_prompt(system_prompt, observation)
        for turn_idx in range(max_turns):
            num_needed = len(self.record.token_ids) + len(given) + self.sampling.max_tokens
            if num_needed > self.max_context_tokens:
                if turn_idx > 0:
                    return EpisodeEnd.CONTEXT_FULL
                raise _EpisodeFailedError(
                    f"the first prompt has {len(given)} tokens, which with max_tokens={self.sampling.max_tokens} exceeds "
                    f"max_context_tokens={self.max_context_tokens}; raise it or shorten the observations"
                )
            self.record.append_given(given)
            start = len(self.record.token_ids)
            completion = await self._generate(turn_idx)
            self.record.append_sampled(completion)
            action = self.chat.decode(completion.token_ids)
            outcome = await self._act(action, observation, start)
            if outcome is None:
                return EpisodeEnd.TURN_TIMEOUT
            if outcome.done:
                return EpisodeEnd.DONE
            observation = outcome.observation
            turn_ended = bool(completion.token_ids) and completion.token_ids[-1] in self.chat.stop_token_ids
            given = self.chat.encode_observation(observation, previous_turn_ended=turn_ended)
        return EpisodeEnd.TURN_CAP

    async def _generate(self, turn_idx: int) -> Completion:
        request = Request(
            request_id=f"t{self.trajectory_id}.{turn_idx}",
            prompt_token_ids=tuple(self.record.token_ids),
            sampling=self.sampling,
            key=SamplingKey(run_seed=self.run_seed, trajectory_id=self.trajectory_id, turn_idx=turn_idx),
            cache_namespace=self.cache_namespace,
        )
        try:
            completion = await self.sampler.generate(request)
        except RequestRejectedError as rejection:
            raise _EpisodeFailedError(f"request {request.request_id} was rejected: {rejection}") from rejection
        assert len(completion.token_ids) == len(completion.behavior_logprobs) == len(completion.weight_versions), completion
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORTED):
            reason = completion.error or "no reason given"
            raise _EpisodeFailedError(f"request {request.request_id} ended with {completion.finish_reason.value}: {reason}")
        return completion

    async def _act(self, action: str, observation: str, start_token_idx: int) -> StepOutcome | None:
        """Carry out the action and record the turn, also when it fails. None if the environment took too long."""
        outcome: StepOutcome | None = None
        reward = 0.0
        try:
            outcome = await self._ask(lambda: self.environment.step(action), StepOutcome, f"step with action {action!r}")
            if not math.isfinite(outcome.reward):
                raise _EpisodeFailedError(f"the environment's step with action {action!r} gave the reward {outcome.reward}")
            reward = float(outcome.reward)
            self.record.success = outcome.success
        except _TurnTimeoutError:
            pass
        finally:
            self.record.reward += reward
            self.record.turns.append(
                Turn(
                    observation=observation,
                    action=action,
                    reward=reward,
                    start_token_idx=start_token_idx,
                    end_token_idx=len(self.record.token_ids),
                )
            )
        return outcome

    async def _ask(self, call: Callable[[], Awaitable[_T]], answer_type: type[_T], what: str) -> _T:
        """Await one call of the environment within the time limit; its errors become this episode's."""
        try:
            answer = await _within(call, self.turn_timeout_s, f"the environment's {what}")
        except (_TurnTimeoutError, asyncio.CancelledError):
            raise
        except Exception as error:  # whatever a user's environment raises ends this episode alone
            raise _EpisodeFailedError(f"the environment's {what} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, answer_type):
            raise _EpisodeFailedError(f"the environment's {what} returned {type(answer).__name__}, not {answer_type.__name__}")
        return answer


def _make_environment(suite: TaskSuite) -> Environment:
    try:
        return suite.make_environment()
    except Exception as error:  # a user's code, as in _ask
        raise _EpisodeFailedError(f"make_environment raised {type(error).__name__}: {error}") from error


async def _awaited(awaitable: Awaitable[_T]) -> _T:
    return await awaitable  # a user's method may return any awaitable; a task takes coroutines only


async def _within(call: Callable[[], Awaitable[_T]], timeout_s: float, what: str) -> _T:
    """Await what `call` returns for at most `timeout_s`; after that it is cancelled and left behind, so it holds nobody up."""
    task = asyncio.create_task(_awaited(call()))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not task.done():
        _abandon(task)
        raise _TurnTimeoutError(f"{what} took longer than {timeout_s} s")
    return task.result()


_abandoned: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks only weakly


def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel without waiting, and log what still comes of it."""

    def forget(done: asyncio.Task[Any]) -> None:
        _abandoned.discard(done)
        if not done.cancelled() and (error := done.exception()) is not None:
            _log.warning("an environment call that was given up raised %r", error)

    _abandoned.add(task)
    asyncio._unregister_task(task)  # from asyncio's interface for extensions: asyncio.run waits at its end for all it knows
    task.add_done_callback(forget)
    task.cancel()


async def _close(environment: Environment) -> None:
    """Close, whatever happens: the trajectory is complete by now, so a failure here is only logged."""
    try:
        await _within(environment.close, CLOSE_TIMEOUT_S, "the environment's close")
    except _TurnTimeoutError as timeout:
        _log.warning("%s; it is left behind", timeout)
    except Exception as error:  # a user's environment may raise anything
        _log.warning("the environment's close raised %r", error)
