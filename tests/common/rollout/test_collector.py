"""A step gets all its groups whatever single episodes do, and the same ones whichever episode ends first."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import EngineClosedError, RolloutError
from common.rollout.buffer import GroupBuffer
from common.rollout.collector import PlayEpisode, collect_groups
from common.rollout.tasks import PromptCursor
from common.types import Group, Task, Trajectory
from tests.common.rollout.fakes import FakeSuite
from tests.common.rollout.test_buffer import trajectory_of

GROUP_SIZE = 3


class Episodes:
    """Plays nothing: the outcome is a function of (trajectory id, attempt), the order of completion of `delays`."""

    def __init__(self, outcome: Callable[[int, int], float | None], delays: list[int] | None = None) -> None:
        self.outcome = outcome
        self.delays = delays or [0]
        self.attempts: Counter[int] = Counter()

    async def __call__(self, *, task: Task, trajectory_id: int, group_id: int) -> Trajectory:
        attempt = self.attempts[trajectory_id]
        self.attempts[trajectory_id] += 1
        for _ in range(self.delays[trajectory_id % len(self.delays)]):
            await asyncio.sleep(0)
        reward = self.outcome(trajectory_id, attempt)
        return trajectory_of(trajectory_id, group_size=GROUP_SIZE, failed=reward is None, reward=reward or 0.0)


def collect(play: PlayEpisode, *, num_groups: int = 4, **options: object) -> tuple[list[Group], PromptCursor]:
    cursor = PromptCursor(FakeSuite(num_tasks=50), seed=0)
    prompts = cursor.take(num_groups)
    return asyncio.run(collect_groups(prompts, play=play, group_size=GROUP_SIZE, cursor=cursor, **options)), cursor  # type: ignore[arg-type]


def contrast_in_odd_groups(trajectory_id: int, attempt: int) -> float:
    return float(trajectory_id // GROUP_SIZE % 2 == 1 and trajectory_id % GROUP_SIZE == 0)


@given(delays=st.lists(st.integers(0, 5), min_size=1, max_size=7))
def test_groups_do_not_depend_on_which_episode_ends_first(delays: list[int]) -> None:
    def outcome(trajectory_id: int, attempt: int) -> float | None:
        return None if trajectory_id % 5 == 0 and attempt == 0 else contrast_in_odd_groups(trajectory_id, attempt)

    groups, cursor = collect(Episodes(outcome, delays), dynamic_sampling=True)
    assert [group.group_id for group in groups] == [1, 3, 5, 7]
    assert [t.trajectory_id for t in groups[0].trajectories] == [3, 4, 5]
    assert cursor.num_taken == 8


def test_without_dynamic_sampling_groups_come_back_one_per_prompt_in_order() -> None:
    progress: list[int] = []
    episodes = Episodes(lambda trajectory_id, attempt: 0.0, [3, 0, 1])
    groups, cursor = collect(episodes, on_trajectory=lambda trajectory: progress.append(trajectory.trajectory_id))
    assert [group.group_id for group in groups] == [0, 1, 2, 3]
    assert sorted(progress) == list(range(4 * GROUP_SIZE))
    assert cursor.num_taken == 4


def test_failed_episodes_are_played_again_under_the_same_ids() -> None:
    episodes = Episodes(lambda trajectory_id, attempt: None if trajectory_id == 4 and attempt < 2 else 0.0)
    buffer = GroupBuffer(group_size=GROUP_SIZE, max_reissues=2)
    groups, _ = collect(episodes, buffer=buffer)
    assert [group.group_id for group in groups] == [0, 1, 2, 3]
    assert episodes.attempts[4] == 3
    assert (buffer.counts.failed_trajectories, buffer.counts.dropped_groups_failed) == (2, 0)


def test_a_group_that_keeps_failing_is_replaced_by_a_new_prompt() -> None:
    episodes = Episodes(lambda trajectory_id, attempt: None if trajectory_id == 4 else 0.0)
    buffer = GroupBuffer(group_size=GROUP_SIZE, max_reissues=1)
    groups, _ = collect(episodes, buffer=buffer)
    assert [group.group_id for group in groups] == [0, 2, 3, 4]
    assert episodes.attempts[4] == 2
    assert buffer.counts.dropped_groups_failed == 1


def test_when_everything_fails_the_last_failure_is_in_the_error_and_nothing_waits_for_ever() -> None:
    with pytest.raises(RolloutError, match=r"only 0 of 4 groups .* the simulator crashed"):
        collect(Episodes(lambda trajectory_id, attempt: None), max_refills=2)


def test_after_the_last_refill_the_places_left_are_filled_with_groups_without_contrast() -> None:
    buffer = GroupBuffer(group_size=GROUP_SIZE)
    groups, cursor = collect(Episodes(contrast_in_odd_groups), dynamic_sampling=True, max_refills=1, buffer=buffer)
    assert [group.group_id for group in groups] == [0, 1, 3, 5]
    assert cursor.num_taken == 6
    assert buffer.counts.dropped_groups_no_contrast == 2


def test_without_a_cursor_nothing_is_replaced() -> None:
    prompts = PromptCursor(FakeSuite(num_tasks=9), seed=0).take(3)
    play = Episodes(lambda trajectory_id, attempt: 0.0)
    groups = asyncio.run(collect_groups(prompts, play=play, group_size=GROUP_SIZE, dynamic_sampling=True))
    assert [group.group_id for group in groups] == [0, 1, 2]
    assert sum(play.attempts.values()) == 9


def test_an_error_that_concerns_all_episodes_ends_them_and_is_raised_as_it_is() -> None:
    cancelled: list[int] = []

    async def play(*, task: Task, trajectory_id: int, group_id: int) -> Trajectory:
        if trajectory_id == 5:
            raise EngineClosedError("the engine was closed")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(trajectory_id)
            raise
        raise AssertionError

    with pytest.raises(EngineClosedError, match="the engine was closed"):
        collect(play, num_groups=3)
    assert sorted(cancelled) == [0, 1, 2, 3, 4, 6, 7, 8]
