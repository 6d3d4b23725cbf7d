"""FrozenLake as text agrees with gymnasium's, its maps are solvable and distinct, and its splits never share one."""

import asyncio
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from common.rollout.chat import ChatTokenizer
from common.rollout.envs import frozen_lake
from common.rollout.envs.frozen_lake import ACTIONS, FrozenLakeEnvironment, FrozenLakeSuite, is_solvable, split_of
from common.types import Split, Task

OPEN_LAKE = ("SFFF", "FHFH", "FFFH", "HFFG")


def task_of(layout: tuple[str, ...], **spec: object) -> Task:
    return Task(task_id="t", split=Split.TRAIN, spec=json.dumps({"rows": layout, **spec}))


def layouts_of(suite: FrozenLakeSuite, split: Split) -> list[tuple[str, ...]]:
    tasks = [suite.task(split, task_idx) for task_idx in range(suite.num_tasks(split))]
    return [tuple(json.loads(task.spec)["rows"]) for task in tasks]


def play(task: Task, actions: list[str] | tuple[str, ...]) -> list[tuple[str, float, bool, bool]]:
    """(observation, reward, done, success) of the reset and of every action up to the end."""

    async def run() -> list[tuple[str, float, bool, bool]]:
        environment = FrozenLakeEnvironment()
        seen = [(await environment.reset(task), 0.0, False, False)]
        for action in actions:
            outcome = await environment.step(action)
            seen.append((outcome.observation, outcome.reward, outcome.done, outcome.success))
            if outcome.done:
                break
        await environment.close()
        await environment.close()
        return seen

    return asyncio.run(run())


def test_splits_are_disjoint_over_sizes_and_seeds() -> None:
    split_by_layout: dict[tuple[str, ...], Split] = {}
    for seed, (size, max_size) in itertools.product(range(4), [(4, None), (3, 6)]):
        counts = {"num_train": 150, "num_validation": 16, "num_held_out": 20}
        suite = FrozenLakeSuite(size=size, max_size=max_size, seed=seed, **counts)
        for split in Split:
            for layout in layouts_of(suite, split):
                assert split_by_layout.setdefault(layout, split) is split


def test_the_default_maps_are_solvable_and_distinct_over_all_splits() -> None:
    suite = FrozenLakeSuite()
    layouts = [layout for split in Split for layout in layouts_of(suite, split)]
    assert len(layouts) == len(set(layouts)) == 2000 + 200 + 500
    assert all(is_solvable(layout) for layout in layouts)


def test_tasks_do_not_depend_on_the_order_or_number_in_which_they_are_asked_for() -> None:
    for size in (4, 6):
        forward, backward = FrozenLakeSuite(size=size), FrozenLakeSuite(size=size, num_train=60)
        backwards = [backward.task(Split.TRAIN, task_idx) for task_idx in reversed(range(60))]
        assert [forward.task(Split.TRAIN, task_idx) for task_idx in range(60)] == backwards[::-1]
        assert forward.task(Split.TRAIN, 0) != FrozenLakeSuite(size=size, seed=1).task(Split.TRAIN, 0)


def test_mixed_sizes_come_in_equal_parts() -> None:
    suite = FrozenLakeSuite(size=4, max_size=7, num_train=40)
    assert Counter(len(layout) for layout in layouts_of(suite, Split.TRAIN)) == {4: 10, 5: 10, 6: 10, 7: 10}


@pytest.mark.parametrize("size", [4, 5])
def test_the_share_of_frozen_cells_is_what_was_asked_for(size: int) -> None:
    def share(frozen_share: float) -> float:
        layouts = layouts_of(FrozenLakeSuite(size=size, num_train=300, frozen_share=frozen_share), Split.TRAIN)
        return float(np.mean(["".join(layout).count("F") / (size * size - 2) for layout in layouts]))

    # solvable maps have fewer holes than drawn ones, and distinct ones more of them, so the two are compared, not hit
    assert share(0.6) + 0.05 < share(0.8) < 0.92


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 2}, ["num_train=2000", "2x2", "has 1 of the 3 solvable ones"]),
        ({"size": 3, "num_train": 40}, ["num_validation=200", "3x3", "of the 51 solvable ones"]),
        ({"size": 3, "max_size": 5}, ["num_train=2000 needs 667 distinct 3x3 maps"]),
        ({"size": 4, "num_held_out": 2000}, ["num_held_out=2000", "of the 3828 solvable ones"]),
        ({"size": 1}, ["size=1"]),
        ({"size": 5, "max_size": 4}, ["max_size=4"]),
        ({"frozen_share": 1.0}, ["frozen_share=1.0"]),
        ({"max_turns": 0}, ["max_turns=0"]),
        ({"num_train": -1}, ["num_train=-1"]),
    ],
)
def test_impossible_options_are_named(options: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        FrozenLakeSuite(**options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_all_maps_of_a_small_size_can_be_asked_for() -> None:
    suite = FrozenLakeSuite(size=3, num_train=42, num_validation=4, num_held_out=5)
    assert len({layout for split in Split for layout in layouts_of(suite, split)}) == 51


def test_the_listed_maps_are_exactly_the_solvable_ones() -> None:
    layouts = [tuple("".join(cells)[i : i + 3] for i in (0, 3, 6)) for cells in itertools.product("S", *["FH"] * 7, "G")]
    listed = [layout for of_split in frozen_lake._all_maps(3).values() for layout in of_split]
    assert sorted(listed) == sorted(filter(is_solvable, layouts))


def test_a_search_for_maps_that_do_not_exist_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_lake, "MAX_DRAWS_WITHOUT_NEW_MAP", 500)
    suite = FrozenLakeSuite(size=5, frozen_share=0.999)
    with pytest.raises(ValueError, match=r"no new solvable 5x5 map .* frozen_share=0.999"):
        layouts_of(suite, Split.TRAIN)


def test_task_indices_outside_the_split_are_refused() -> None:
    for task_idx in (-1, 200):
        with pytest.raises(IndexError, match="validation"):
            FrozenLakeSuite().task(Split.VALIDATION, task_idx)


def test_the_shares_of_the_splits_add_up() -> None:
    assert sum(frozen_lake.SPLIT_PERCENT.values()) == 100
    counts = Counter(split_of((f"{idx}",)) for idx in range(5000))
    assert all(abs(counts[split] / 50 - percent) < 3 for split, percent in frozen_lake.SPLIT_PERCENT.items())


def test_the_grid_is_shown_once_and_then_position_and_neighbours() -> None:
    seen = play(task_of(OPEN_LAKE), ["right", "down"])
    assert [observation for observation, *_ in seen[:2]] == [
        "S F F F / F H F H / F F F H / H F F G r0c0 up=wall,down=F left=wall,right=F",
        "r0c1 up=wall,down=H left=S,right=F",
    ]
    assert seen[2][1:] == (0.0, True, False), "a hole ends the episode without reward"


def test_the_goal_pays_one_and_ends_the_episode() -> None:
    seen = play(task_of(OPEN_LAKE), ["down", "down", "right", "down", "right", "right"])
    assert [reward for _, reward, _, _ in seen] == [0, 0, 0, 0, 0, 0, 1]
    assert seen[-1][2:] == (True, True)
    assert not any(done for _, _, done, _ in seen[:-1])


@pytest.mark.parametrize("action", ["", "north", "up down", "UP", "right right", "0"])
def test_an_invalid_action_says_so_and_changes_nothing(action: str) -> None:
    seen = play(task_of(OPEN_LAKE), [action, "right"])
    assert seen[1] == ("invalid r0c0 up=wall,down=F left=wall,right=F", 0.0, False, False)
    assert seen[2][0].startswith("r0c1 ")


def test_slips_are_the_same_each_time_a_task_is_played_and_differ_between_tasks() -> None:
    suite = FrozenLakeSuite(slippery=True)
    tasks = [suite.task(Split.TRAIN, task_idx) for task_idx in range(12)]
    actions = ["right", "down"] * 6
    assert [play(task, actions) for task in tasks] == [play(task, actions) for task in tasks]
    same_map = [task_of(OPEN_LAKE, slip_seed=json.loads(task.spec)["slip_seed"]) for task in tasks]
    assert len({str(play(task, actions)) for task in same_map}) > 1


@pytest.mark.parametrize("slippery", [False, True])
def test_every_text_is_made_of_words_of_the_vocabulary(slippery: bool) -> None:
    suite = FrozenLakeSuite(size=4, max_size=6, slippery=slippery, explain_rules=True)
    vocabulary = set(suite.vocabulary())
    chat = ChatTokenizer.from_vocabulary(suite.vocabulary())
    rng = np.random.default_rng(0)
    for task_idx in range(30):
        task = suite.task(Split.HELD_OUT, task_idx)
        for observation, *_ in play(task, [*rng.choice([*ACTIONS, "nonsense"], size=10)]):
            assert vocabulary.issuperset(observation.split())
            assert 1 not in chat.encode_prompt(suite.system_prompt, observation), "1 is the unknown token"


def test_a_first_prompt_and_a_turn_cost_as_few_tokens_as_the_docs_say() -> None:
    suite = FrozenLakeSuite()
    chat = ChatTokenizer.from_vocabulary(suite.vocabulary())
    first, later = (observation for observation, *_ in play(suite.task(Split.TRAIN, 0), ["nonsense"]))
    assert len(chat.encode_prompt(None, first)) == 4 * 4 + 3 + 3 + 2
    assert len(chat.encode_observation(later, previous_turn_ended=True)) == 1 + 3 + 2


def shortest_length(layout: tuple[str, ...]) -> int:
    distances = {(0, 0): 0}
    queue = [(0, 0)]
    for row, col in queue:
        for cell in ((row + 1, col), (row - 1, col), (row, col + 1), (row, col - 1)):
            inside = 0 <= cell[0] < len(layout) and 0 <= cell[1] < len(layout)
            if inside and cell not in distances and layout[cell[0]][cell[1]] != "H":
                distances[cell] = distances[row, col] + 1
                queue.append(cell)
    return distances[len(layout) - 1, len(layout) - 1]


@pytest.mark.parametrize("size", [4, 8])
def test_the_expert_takes_a_shortest_way(size: int) -> None:
    async def expert_turns(task: Task) -> int:
        environment = FrozenLakeEnvironment()
        await environment.reset(task)
        for num_turns in itertools.count(1):
            outcome = await environment.step(environment.expert_action())
            if outcome.done:
                assert outcome.success
                return num_turns
        raise AssertionError

    suite = FrozenLakeSuite(size=size)
    for task_idx in range(40):
        task = suite.task(Split.TRAIN, task_idx)
        assert asyncio.run(expert_turns(task)) == shortest_length(tuple(json.loads(task.spec)["rows"]))


def test_on_slippery_ice_the_expert_does_far_better_than_chance() -> None:
    async def success(task: Task, *, expert: bool) -> bool:
        environment = FrozenLakeEnvironment()
        await environment.reset(task)
        rng = np.random.default_rng(task_idx)
        for _ in range(suite.max_turns):
            outcome = await environment.step(environment.expert_action() if expert else environment.random_action(rng))
            if outcome.done:
                return outcome.success
        return False

    suite = FrozenLakeSuite(slippery=True)
    wins = {True: 0, False: 0}
    for task_idx in range(60):
        for expert in wins:
            wins[expert] += asyncio.run(success(suite.task(Split.TRAIN, task_idx), expert=expert))
    assert wins[True] > 3 * wins[False]


def test_the_default_turn_cap_is_twice_the_way_without_detour_and_three_times_that_on_slippery_ice() -> None:
    assert [FrozenLakeSuite(size=4, slippery=slippery).max_turns for slippery in (False, True)] == [12, 36]
    assert FrozenLakeSuite(size=4, max_size=8).max_turns == 28
    assert FrozenLakeSuite(max_turns=9).max_turns == 9
