"""A household as text: find an object in rooms full of containers and put it where the task says.

Each turn shows the room, its containers and what the agent holds: a container is `shut`, `empty`, or lists what lies in it.
Other rooms and shut containers hide their content, so the object has to be searched for, and how long that takes has a long
tail. An action is one of `go ROOM`, `open CONTAINER`, `take OBJECT`, `put CONTAINER`. Other text is answered `invalid`, an
action that is impossible now `cannot`, both with the unchanged room; the turn counts. Reward is 1 when every object of the task
lies in its container, else 0.

Which split a task belongs to follows from its (object, container) pairs alone: no pair of one split occurs in another, while
every object occurs in all of them. Invariant: one task plays the same each time; nothing is drawn while playing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from common.rollout.environment import StepOutcome
from common.types import Split, Task

ROOMS = ("kitchen", "bedroom", "study", "bathroom", "hall", "cellar")
CONTAINERS = (
    *("fridge", "oven", "cupboard", "wardrobe", "nightstand", "chest", "desk", "shelf", "safe", "cabinet", "basket", "hamper"),
    *("locker", "bench", "trunk", "crate", "barrel", "toolbox", "drawer", "sideboard", "box", "bin", "rack", "vault"),
)
OBJECTS = (
    *("apple", "cup", "key", "book", "lamp", "towel", "knife", "clock", "plate", "pen", "shirt", "ball"),
    *("phone", "candle", "bottle", "spoon", "hat", "coin", "rope", "soap", "brush", "radio", "map", "glove"),
)
VERBS = ("go", "open", "take", "put")
INVALID, CANNOT = "invalid", "cannot"
SHUT, EMPTY, HOLD = "shut", "empty", "hold"
FIND, INTO, GOALS_END = "find=", "into=", ":"
"""The task reads `find=OBJECT into=CONTAINER :`, words of their own, as a neighbour in FrozenLake does. With `put OBJECT CONTAINER`
a small model learnt to search but not, in a few hundred updates, where to put what it had found."""
RULES = (
    "You are in a house . Each turn you see the room , its containers ( shut , empty , or what lies in them ) and what you hold . "
    "Answer with one action : go room , open container , take object , put container . You can hold one object"
)

IMPOSSIBLE_SHARE = 0.5
"""Of random actions in demonstrations, those drawn from all actions of the house, most of them impossible at the time. Without
them a policy never saw `cannot` in its warm-up, and repeated the impossible action to the end when decoding greedily."""

Places = dict[str, str]
"""object -> container."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class House:
    """What all tasks of a suite share: the containers of each room, and the objects there may be."""

    rooms: Mapping[str, tuple[str, ...]]
    objects: tuple[str, ...]

    @property
    def containers(self) -> tuple[str, ...]:
        return tuple(container for containers in self.rooms.values() for container in containers)


def split_of(object_idx: int, container_idx: int, num_containers: int) -> Split:
    """The split of a pair: of the containers, turned by one place per object, the first is held out, the second for validation."""
    place = (container_idx + object_idx) % num_containers
    return {0: Split.HELD_OUT, 1: Split.VALIDATION}.get(place, Split.TRAIN)


class HouseholdSuite:
    """Household tasks in a house of `num_rooms` x `containers_per_room`.

    Args:
        num_distractors: objects that lie about besides those of the task.
        open_share: chance that a container stands open at the start.
        max_goals: tasks ask for 1 to max_goals objects, one more with probability more_goals_share each time.
        explain_rules: say the rules in a system prompt, for models that do not learn them from demonstrations.
    """

    def __init__(
        self,
        num_rooms: int = 2,
        containers_per_room: int = 3,
        num_objects: int = 8,
        num_distractors: int = 3,
        open_share: float = 0.25,
        max_goals: int = 1,
        more_goals_share: float = 0.3,
        max_turns: int = 20,
        num_train: int = 4096,
        num_validation: int = 256,
        num_held_out: int = 512,
        seed: int = 0,
        explain_rules: bool = False,
    ) -> None:
        _check_range("num_rooms", num_rooms, 1, len(ROOMS))
        _check_range("containers_per_room", containers_per_room, 1, len(CONTAINERS) // num_rooms)
        num_containers = num_rooms * containers_per_room
        if num_containers < len(Split):
            raise ValueError(
                f"num_rooms={num_rooms} x containers_per_room={containers_per_room} are {num_containers} containers; the three "
                f"splits need at least {len(Split)}, raise one of them"
            )
        _check_range("num_objects", num_objects, 1, len(OBJECTS))
        _check_range("max_goals", max_goals, 1, num_objects)
        _check_range("num_distractors", num_distractors, 0, num_objects - max_goals)
        _check_range("open_share", open_share, 0, 1)
        _check_range("more_goals_share", more_goals_share, 0, 1)
        _check_range("max_turns", max_turns, 1, 10_000)
        rooms = {
            room: CONTAINERS[idx * containers_per_room : (idx + 1) * containers_per_room]
            for idx, room in enumerate(ROOMS[:num_rooms])
        }
        self.house = House(rooms=rooms, objects=OBJECTS[:num_objects])
        self._num_tasks = {Split.TRAIN: num_train, Split.VALIDATION: num_validation, Split.HELD_OUT: num_held_out}
        for split, num_tasks in self._num_tasks.items():
            _check_range(f"num_{split.value}", num_tasks, 0, 10**9)
        self._num_distractors = num_distractors
        self._open_share = open_share
        self._max_goals = max_goals
        self._more_goals_share = more_goals_share
        self._max_turns = max_turns
        self._seed = seed
        self._rules = RULES if explain_rules else None

    @property
    def system_prompt(self) -> str | None:
        return self._rules

    @property
    def max_turns(self) -> int:
        return self._max_turns

    def num_tasks(self, split: Split) -> int:
        return self._num_tasks[split]

    def task(self, split: Split, task_idx: int) -> Task:
        if not 0 <= task_idx < self._num_tasks[split]:
            raise IndexError(f"task {task_idx} of split {split.value}, which has {self._num_tasks[split]}")
        rng = np.random.default_rng([self._seed, list(Split).index(split), task_idx])
        containers, objects = self.house.containers, self.house.objects
        num_goals = 1
        while num_goals < self._max_goals and rng.random() < self._more_goals_share:
            num_goals += 1
        present = [int(idx) for idx in rng.permutation(len(objects))[: num_goals + self._num_distractors]]
        goals: Places = {}
        places: Places = {}
        for rank, object_idx in enumerate(present):
            allowed = range(len(containers))
            if rank < num_goals:
                targets = [idx for idx in allowed if split_of(object_idx, idx, len(containers)) is split]
                goal_idx = int(rng.choice(targets))
                goals[objects[object_idx]] = containers[goal_idx]
                places[objects[object_idx]] = containers[int(rng.choice([idx for idx in allowed if idx != goal_idx]))]
            else:
                places[objects[object_idx]] = containers[int(rng.choice(allowed))]
        spec = {
            "rooms": {room: list(names) for room, names in self.house.rooms.items()},
            "start": str(rng.choice(list(self.house.rooms))),
            "goals": goals,
            "places": places,
            "open": [container for container in containers if rng.random() < self._open_share],
        }
        return Task(task_id=f"household-{self._seed}-{split.value}-{task_idx}", split=split, spec=json.dumps(spec))

    def make_environment(self) -> HouseholdEnvironment:
        return HouseholdEnvironment()

    def vocabulary(self) -> Sequence[str]:
        words = [*VERBS, INVALID, CANNOT, SHUT, EMPTY, HOLD, GOALS_END]
        words += [*self.house.rooms, *self.house.containers, *self.house.objects]
        words += [FIND + name for name in self.house.objects] + [INTO + container for container in self.house.containers]
        words += [] if self._rules is None else self._rules.split()
        return tuple(dict.fromkeys(words))


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} must lie in [{low}, {high}]")


class HouseholdEnvironment:
    """One episode; also a Demonstrator whose expert knows the house and what it has seen, but not what is hidden."""

    def __init__(self) -> None:
        self._rooms: dict[str, list[str]] = {}
        self._goals: Places = {}
        self._places: Places = {}
        self._open: set[str] = set()
        self._room = ""
        self._held: str | None = None
        self._objects: list[str] = []
        self._looked: set[str] = set()
        """Containers whose content was in sight at some time."""

    async def reset(self, task: Task) -> str:
        spec = json.loads(task.spec)
        self._rooms, self._goals, self._places = spec["rooms"], spec["goals"], spec["places"]
        self._objects = list(self._places)
        self._open, self._room, self._held, self._looked = set(spec["open"]), spec["start"], None, set()
        goals = " ".join(f"{FIND}{name} {INTO}{container}" for name, container in self._goals.items())
        return f"{goals} {GOALS_END} {self._look()}"

    async def step(self, action: str) -> StepOutcome:
        words = action.split()
        if len(words) != 2 or words[0] not in VERBS:
            return StepOutcome(observation=f"{INVALID} {self._look()}", reward=0.0, done=False)
        if (words[0], words[1]) not in self._possible_actions():
            return StepOutcome(observation=f"{CANNOT} {self._look()}", reward=0.0, done=False)
        self._carry_out(*words)
        done = all(self._places.get(name) == container for name, container in self._goals.items())
        return StepOutcome(observation=self._look(), reward=float(done), done=done, success=done)

    async def close(self) -> None:
        """Holds nothing outside itself."""

    def expert_action(self) -> str:
        return " ".join(self._expert_choice())

    def random_action(self, rng: np.random.Generator) -> str:
        actions = self._possible_actions()
        if rng.random() < IMPOSSIBLE_SHARE or not actions:
            containers = [container for names in self._rooms.values() for container in names]
            names = {"go": list(self._rooms), "open": containers, "take": self._objects, "put": containers}
            verb = VERBS[rng.integers(len(VERBS))]
            actions = [(verb, name) for name in names[verb]]
        return " ".join(actions[rng.integers(len(actions))])

    def _look(self) -> str:
        """What the agent sees; all containers that stand open here count as looked into from now on."""
        words = [self._room]
        for container in self._rooms[self._room]:
            words.append(container)
            if container in self._open:
                self._looked.add(container)
                words += self._content(container) or [EMPTY]
            else:
                words.append(SHUT)
        return " ".join(words if self._held is None else [*words, HOLD, self._held])

    def _content(self, container: str) -> list[str]:
        return [name for name, place in self._places.items() if place == container]

    def _open_here(self) -> list[str]:
        return [container for container in self._rooms[self._room] if container in self._open]

    def _possible_actions(self) -> list[tuple[str, str]]:
        actions = [("go", room) for room in self._rooms if room != self._room]
        actions += [("open", container) for container in self._rooms[self._room] if container not in self._open]
        if self._held is None:
            return actions + [("take", name) for container in self._open_here() for name in self._content(container)]
        return actions + [("put", container) for container in self._open_here()]

    def _carry_out(self, verb: str, name: str) -> None:
        match verb:
            case "go":
                self._room = name
            case "open":
                self._open.add(name)
            case "take":
                del self._places[name]
                self._held = name
            case "put":
                assert self._held is not None
                self._places[self._held], self._held = name, None

    def _room_of(self, container: str) -> str:
        return next(room for room, containers in self._rooms.items() if container in containers)

    def _expert_choice(self) -> tuple[str, str]:
        if self._held in self._goals:
            return self._towards(self._goals[self._held], "put", self._goals[self._held])
        if self._held is not None:  # picked up by a random action: out of the hands, anywhere
            here = self._open_here()
            return ("put", here[0]) if here else ("open", self._rooms[self._room][0])
        wanted = [name for name, container in self._goals.items() if self._places[name] != container]
        for name in wanted:
            if self._places[name] in self._looked:
                return self._towards(self._places[name], "take", name)
        return self._search()

    def _towards(self, container: str, verb: str, name: str) -> tuple[str, str]:
        """The next action on the way to doing `verb name` at `container`."""
        if self._room_of(container) != self._room:
            return "go", self._room_of(container)
        return (verb, name) if container in self._open else ("open", container)

    def _search(self) -> tuple[str, str]:
        """Look where it has not looked: first here, then in the next room that hides something."""
        for room in (self._room, *self._rooms):
            for container in self._rooms[room]:
                if container not in self._looked:
                    return ("open", container) if room == self._room else ("go", room)
        raise AssertionError("an object of the task is in none of the containers")
