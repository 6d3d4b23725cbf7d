"""The household: what is hidden stays hidden, splits share no pair, every action is answered."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.rollout.environment import Demonstrator, StepOutcome, load_task_suite
from common.rollout.envs.household import CANNOT, INVALID, HouseholdEnvironment, HouseholdSuite
from common.types import Split, Task

SPEC = {
    "rooms": {"kitchen": ["fridge", "oven"], "bedroom": ["chest"]},
    "start": "kitchen",
    "goals": {"key": "oven"},
    "places": {"key": "chest", "cup": "fridge"},
    "open": ["chest"],
}


def start(spec: dict = SPEC) -> tuple[HouseholdEnvironment, str]:
    environment = HouseholdEnvironment()
    task = Task(task_id="t", split=Split.TRAIN, spec=json.dumps(spec))
    return environment, asyncio.run(environment.reset(task))


def act(environment: HouseholdEnvironment, *actions: str) -> list[StepOutcome]:
    return [asyncio.run(environment.step(action)) for action in actions]


def play_expert(suite: HouseholdSuite, task: Task, max_turns: int = 200) -> list[str]:
    """The expert's actions; fails unless the last one, and no other, ends the task."""
    environment, actions = suite.make_environment(), []
    asyncio.run(environment.reset(task))
    while len(actions) < max_turns:
        actions.append(environment.expert_action())
        (outcome,) = act(environment, actions[-1])
        assert not outcome.observation.startswith((INVALID, CANNOT)), actions
        assert outcome.reward == float(outcome.done) == float(outcome.success)
        if outcome.done:
            return actions
    raise AssertionError(f"the expert does not arrive: {actions}")


def test_an_episode_reads_as_documented() -> None:
    environment, first = start()
    assert first == "find=key into=oven : kitchen fridge shut oven shut"
    outcomes = act(environment, "open fridge", "go bedroom", "take key", "go kitchen", "open oven", "put oven")
    assert [outcome.observation for outcome in outcomes[:-1]] == [
        "kitchen fridge cup oven shut",
        "bedroom chest key",
        "bedroom chest empty hold key",
        "kitchen fridge cup oven shut hold key",
        "kitchen fridge cup oven empty hold key",
    ]
    assert [outcome.done for outcome in outcomes] == [False] * 5 + [True]
    assert outcomes[-1].success
    assert sum(outcome.reward for outcome in outcomes) == 1.0


@pytest.mark.parametrize("action", ["", "go", "fly kitchen", "take the key", "open fridge now", "OPEN fridge", "<|end|>"])
def test_text_that_is_no_action_is_answered_as_invalid(action: str) -> None:
    environment, _ = start()
    (outcome,) = act(environment, action)
    assert outcome == StepOutcome(observation=f"{INVALID} kitchen fridge shut oven shut", reward=0.0, done=False)


@pytest.mark.parametrize(
    "action", ["go kitchen", "go cellar", "open chest", "take cup", "take key", "put oven", "put chest", "open key", "take oven"]
)
def test_an_impossible_action_changes_nothing(action: str) -> None:
    environment, _ = start()
    (outcome,) = act(environment, action)
    assert outcome == StepOutcome(observation=f"{CANNOT} kitchen fridge shut oven shut", reward=0.0, done=False)


def test_a_second_object_cannot_be_taken() -> None:
    environment, _ = start()
    outcomes = act(environment, "open fridge", "take cup", "take cup", "go bedroom", "take key", "put chest", "take key")
    assert [outcome.observation.startswith(CANNOT) for outcome in outcomes] == [False, False, True, False, True, False, False]


def test_shut_containers_and_other_rooms_are_not_shown() -> None:
    suite = HouseholdSuite()
    for task_idx in range(100):
        task = suite.task(Split.TRAIN, task_idx)
        spec = json.loads(task.spec)
        environment = suite.make_environment()
        _, _, seen = asyncio.run(environment.reset(task)).partition(":")
        visible = {
            name for name, place in spec["places"].items() if place in spec["open"] and place in spec["rooms"][spec["start"]]
        }
        assert {word for word in seen.split() if word in suite.house.objects} == visible


@pytest.mark.parametrize("options", [{}, {"num_rooms": 3, "containers_per_room": 4, "num_objects": 12, "max_goals": 3}])
def test_no_pair_of_one_split_occurs_in_another_and_every_word_occurs_in_training(options: dict) -> None:
    suite = HouseholdSuite(**options)
    pairs = {
        split: {pair for idx in range(256) for pair in json.loads(suite.task(split, idx).spec)["goals"].items()} for split in Split
    }
    for split in Split:
        others = set().union(*(pairs[other] for other in Split if other is not split))
        assert pairs[split]
        assert not pairs[split] & others
    assert {name for name, _ in pairs[Split.TRAIN]} == set(suite.house.objects)
    assert {container for _, container in pairs[Split.TRAIN]} == set(suite.house.containers)


def test_a_task_is_always_the_same_and_tasks_of_a_split_differ() -> None:
    first, second = HouseholdSuite(), HouseholdSuite()
    for split in Split:
        tasks = [first.task(split, idx) for idx in range(100)]
        assert tasks == [second.task(split, idx) for idx in range(100)]
        assert len({task.spec for task in tasks}) == 100
    assert first.task(Split.TRAIN, 0) != HouseholdSuite(seed=1).task(Split.TRAIN, 0)
    with pytest.raises(IndexError, match="task 4096 of split train, which has 4096"):
        first.task(Split.TRAIN, 4096)


@pytest.mark.parametrize(
    "options",
    [{}, {"open_share": 0.0}, {"open_share": 1.0, "num_distractors": 0}, {"num_rooms": 6, "num_objects": 24, "max_goals": 4}],
)
def test_the_expert_solves_every_task_and_never_opens_what_it_has_seen(options: dict) -> None:
    suite = HouseholdSuite(**options)
    for task_idx in range(60):
        actions = play_expert(suite, suite.task(Split.TRAIN, task_idx))
        opened = [action for action in actions if action.startswith("open")]
        assert len(opened) == len(set(opened))


def test_the_expert_does_not_know_what_is_hidden() -> None:
    """Until the object has been in sight, where it lies makes no difference to what the expert does."""
    suite = HouseholdSuite()
    for task_idx in range(50):
        task = suite.task(Split.TRAIN, task_idx)
        spec = json.loads(task.spec)
        ((name, goal),) = spec["goals"].items()
        paths = []
        for place in suite.house.containers:
            if place != goal:
                spec["places"][name] = place
                paths.append(play_expert(suite, Task(task_id="t", split=Split.TRAIN, spec=json.dumps(spec))))
        searches = [path[: path.index(f"take {name}")] for path in paths]
        longest = max(searches, key=len)
        for search in searches:
            assert search == longest[: len(search)]


@settings(max_examples=50, deadline=None)
@given(task_idx=st.integers(0, 4095), seed=st.integers(0, 2**32 - 1), max_goals=st.integers(1, 3))
def test_after_any_random_actions_the_expert_still_arrives(task_idx: int, seed: int, max_goals: int) -> None:
    suite = HouseholdSuite(max_goals=max_goals)
    environment, rng = suite.make_environment(), np.random.default_rng(seed)
    assert isinstance(environment, Demonstrator)
    words = set(suite.vocabulary())
    observation = asyncio.run(environment.reset(suite.task(Split.TRAIN, task_idx)))
    for turn_idx in range(120):
        is_random = turn_idx < 30 and rng.random() < 0.7
        action = environment.random_action(rng) if is_random else environment.expert_action()
        assert set(observation.split()) | set(action.split()) <= words
        (outcome,) = act(environment, action)
        observation = outcome.observation
        assert not observation.startswith(INVALID)
        assert is_random or not observation.startswith(CANNOT)
        if outcome.done:
            return
    raise AssertionError("the expert does not arrive")


def test_random_actions_are_of_every_kind_and_some_are_impossible() -> None:
    environment, _ = start()
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(300):
        action = environment.random_action(rng)
        (outcome,) = act(environment, action)
        answers.append((action.split()[0], outcome.observation.split()[0]))
        if outcome.done:
            environment, _ = start()
    assert {verb for verb, _ in answers} == {"go", "open", "take", "put"}
    num_impossible = sum(word == CANNOT for _, word in answers)
    assert 60 < num_impossible < 180
    assert INVALID not in {word for _, word in answers}


def test_the_vocabulary_has_no_word_twice_and_covers_the_rules() -> None:
    suite = HouseholdSuite(explain_rules=True)
    words = suite.vocabulary()
    assert len(words) == len(set(words))
    assert suite.system_prompt is not None
    assert set(suite.system_prompt.split()) | {INVALID, CANNOT} <= set(words)
    assert HouseholdSuite().system_prompt is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_rooms": 0}, ["num_rooms=0", "[1, 6]"]),
        ({"containers_per_room": 13}, ["containers_per_room=13", "[1, 12]"]),
        ({"num_rooms": 1, "containers_per_room": 2}, ["2 containers", "at least 3"]),
        ({"num_objects": 25}, ["num_objects=25"]),
        ({"num_distractors": 8}, ["num_distractors=8", "[0, 7]"]),
        ({"open_share": 1.5}, ["open_share=1.5"]),
        ({"max_turns": 0}, ["max_turns=0"]),
        ({"num_held_out": -1}, ["num_held_out=-1"]),
    ],
)
def test_bad_options_are_named(options: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0].replace("[", r"\[")) as error:
        load_task_suite("common.rollout.envs.household:HouseholdSuite", options)
    for word in words:
        assert word in str(error.value)
