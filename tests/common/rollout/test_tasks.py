"""The order of prompts is endless, fair and determined by one integer."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.rollout.tasks import PromptCursor
from common.types import Split
from tests.common.rollout.fakes import FakeSuite


@given(num_tasks=st.integers(1, 9), before=st.integers(0, 30), after=st.integers(0, 30), seed=st.integers(0, 2**40))
def test_a_restored_cursor_goes_on_with_the_prompt_that_would_have_come_next(
    num_tasks: int, before: int, after: int, seed: int
) -> None:
    whole = PromptCursor(FakeSuite(num_tasks=num_tasks), seed=seed)
    prompts = whole.take(before + after)
    first = PromptCursor(FakeSuite(num_tasks=num_tasks), seed=seed)
    taken = first.take(before)
    resumed = PromptCursor(FakeSuite(num_tasks=num_tasks), seed=seed, num_taken=first.num_taken)
    assert taken + resumed.take(after) == prompts
    assert resumed.num_taken == whole.num_taken


def test_every_epoch_has_each_task_once_in_an_order_of_its_own() -> None:
    cursor = PromptCursor(FakeSuite(num_tasks=20), seed=1)
    epochs = [[task.task_id for _, task in cursor.take(20)] for _ in range(3)]
    assert all(set(Counter(epoch).values()) == {1} and len(epoch) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_group_ids_are_running_numbers_across_epochs() -> None:
    cursor = PromptCursor(FakeSuite(num_tasks=3), seed=0)
    assert [group_id for group_id, _ in cursor.take(5) + cursor.take(2)] == list(range(7))


def test_another_seed_gives_another_order() -> None:
    orders = [[task.task_id for _, task in PromptCursor(FakeSuite(num_tasks=20), seed=seed).take(20)] for seed in (0, 1)]
    assert orders[0] != orders[1]


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="FakeSuite has no tasks in split validation"):
        PromptCursor(FakeSuite(num_tasks=0), seed=0, split=Split.VALIDATION)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(ValueError, match="num_taken=-1"):
        PromptCursor(FakeSuite(), seed=0, num_taken=-1)
