"""FrozenLake as text, on gymnasium's FrozenLake-v1: walk from S to G over frozen cells (F) without falling into a hole (H).

The whole grid is shown once, then each turn the position and the four neighbours; every piece is one word of `vocabulary()`. An
action is exactly one of the words up, down, left, right. Anything else is invalid: the next observation starts with `invalid`, the
state stays as it was and the turn counts. Reward is 1 at the goal and 0 otherwise; a hole ends the episode.

Maps are random, solvable and distinct. Which split a map belongs to is a fixed hash of its layout, so the splits are disjoint for
every seed and every number of tasks. A task's spec holds the map and the seed of its slips: one task plays the same each time.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

import gymnasium
import numpy as np

from common.rollout.environment import StepOutcome
from common.types import Split, Task

ACTIONS = ("left", "down", "right", "up")  # in gymnasium's order: the index is its action
NEIGHBOURS = (("up", -1, 0), ("down", 1, 0), ("left", 0, -1), ("right", 0, 1))
NEIGHBOUR_PAIRS = (("up", "down"), ("left", "right"))
WALL = "wall"
INVALID = "invalid"
RULES = (
    "You walk on a frozen lake . The grid is shown once , row by row : S start , F frozen , H hole , G goal . Each turn you see "
    "your row r and column c and the four neighbours . Reach G and never step on H . Answer with one word : up down left right"
)
SLIPPERY_RULES = "The ice is slippery : a move may turn aside ."

# Share of all maps that belongs to each split, in percent. There are 3,828 solvable 4x4 maps.
SPLIT_PERCENT = {Split.TRAIN: 70, Split.VALIDATION: 10, Split.HELD_OUT: 20}
MAX_ENUMERATED_SIZE = 4  # up to here all maps are listed (2^14 layouts); from 5x5 on there are millions and they are drawn
MAX_DRAWS_WITHOUT_NEW_MAP = 100_000  # ends the search when frozen_share makes new solvable maps too rare
EXPERT_DISCOUNT = 0.95  # below 1, so that of two sure ways the shorter is worth more
EXPERT_TOLERANCE = 1e-9

Layout = tuple[str, ...]


def _position_word(row: int, col: int) -> str:
    return f"r{row}c{col}"


def _pair_word(pair: tuple[str, str], neighbours: Mapping[str, str]) -> str:
    """Two opposite neighbours in one word: each token of a turn costs compute, and two words a turn say what four would."""
    return ",".join(f"{direction}={neighbours[direction]}" for direction in pair)


def split_of(layout: Layout) -> Split:
    """The split a map belongs to, whatever the seed."""
    digest = hashlib.blake2b("/".join(layout).encode(), digest_size=8).digest()
    percent = int.from_bytes(digest, "big") % 100
    for split, share in SPLIT_PERCENT.items():
        if percent < share:
            return split
        percent -= share
    raise AssertionError(f"SPLIT_PERCENT={SPLIT_PERCENT} does not add up to 100")


def is_solvable(layout: Layout) -> bool:
    """Whether G can be reached from S over frozen cells."""
    size = len(layout)
    seen, frontier = {(0, 0)}, [(0, 0)]
    while frontier:
        row, col = frontier.pop()
        if layout[row][col] == "G":
            return True
        for _, row_step, col_step in NEIGHBOURS:
            cell = (row + row_step, col + col_step)
            if cell not in seen and 0 <= cell[0] < size and 0 <= cell[1] < size and layout[cell[0]][cell[1]] != "H":
                seen.add(cell)
                frontier.append(cell)
    return False


def _to_layout(is_frozen: Sequence[bool] | np.ndarray, size: int) -> Layout:
    """The map whose cells between start and goal, row by row, are frozen (True) or holes."""
    cells = "S" + "".join("F" if frozen else "H" for frozen in is_frozen) + "G"
    return tuple(cells[row * size : (row + 1) * size] for row in range(size))


@functools.cache
def _all_maps(size: int) -> dict[Split, tuple[Layout, ...]]:
    """Every solvable map of one small size, by split. All layouts are flooded from the start at once, one bit to a cell."""
    num_cells = size * size
    codes = np.arange(2 ** (num_cells - 2), dtype=np.uint32)
    walkable = codes << 1 | 1 | 1 << (num_cells - 1)
    not_first_col = sum(1 << cell for cell in range(num_cells) if cell % size > 0)
    not_last_col = sum(1 << cell for cell in range(num_cells) if cell % size < size - 1)
    reached: np.ndarray = np.ones_like(codes)
    while True:
        beside = (reached & not_first_col) >> 1 | (reached & not_last_col) << 1 | reached >> size | reached << size
        grown = reached | beside & walkable
        if np.array_equal(grown, reached):
            break
        reached = grown
    maps: dict[Split, list[Layout]] = {split: [] for split in Split}
    for code in codes[reached >> (num_cells - 1) & 1 == 1].tolist():
        layout = _to_layout([bool(code >> bit & 1) for bit in range(num_cells - 2)], size)
        maps[split_of(layout)].append(layout)
    return {split: tuple(layouts) for split, layouts in maps.items()}


def _listed_maps(split: Split, size: int, frozen_share: float, rng: np.random.Generator) -> Iterator[Layout]:
    """All maps of a small size in random order, likelier ones first: drawing without replacement by exponential keys."""
    layouts = _all_maps(size)[split]
    num_holes = np.array([sum(row.count("H") for row in layout) for layout in layouts])
    log_weights = num_holes * np.log(1 - frozen_share) + (size * size - 2 - num_holes) * np.log(frozen_share)
    order = np.argsort(np.log(rng.exponential(size=len(layouts))) - log_weights, kind="stable")
    yield from (layouts[idx] for idx in order)


def _drawn_maps(split: Split, size: int, frozen_share: float, rng: np.random.Generator) -> Iterator[Layout]:
    """Distinct solvable maps of a size too large to list, drawn cell by cell."""
    seen: set[Layout] = set()
    num_draws = 0
    while num_draws < MAX_DRAWS_WITHOUT_NEW_MAP:
        num_draws += 1
        layout = _to_layout(rng.random(size * size - 2) < frozen_share, size)
        if split_of(layout) is split and layout not in seen and is_solvable(layout):
            seen.add(layout)
            num_draws = 0
            yield layout
    raise ValueError(
        f"no new solvable {size}x{size} map in {MAX_DRAWS_WITHOUT_NEW_MAP} draws with frozen_share={frozen_share} after "
        f"{len(seen)} for split {split.value}; move frozen_share towards 0.8 or ask for fewer tasks"
    )


class FrozenLakeSuite:
    """FrozenLake tasks on maps of `size` x `size`, or of all sizes from `size` to `max_size` in equal parts.

    Args:
        frozen_share: chance that a cell is frozen before unsolvable maps are thrown away, between 0 and 1.
        slippery: a move goes aside two times out of three, as in gymnasium.
        max_turns: default 4 x (largest size - 1), twice the moves of a way without detour (every 4x4 map can be solved in 6,
            so 12); three times that when slippery.
        explain_rules: say the rules in a system prompt, for models that do not learn them from demonstrations.
    """

    def __init__(
        self,
        size: int = 4,
        max_size: int | None = None,
        frozen_share: float = 0.8,
        slippery: bool = False,
        max_turns: int | None = None,
        num_train: int = 2000,
        num_validation: int = 200,
        num_held_out: int = 500,
        seed: int = 0,
        explain_rules: bool = False,
    ) -> None:
        largest = size if max_size is None else max_size
        if not 2 <= size <= largest:
            raise ValueError(f"size={size}, max_size={max_size}: sizes must be at least 2 and max_size not below size")
        if not 0 < frozen_share < 1:
            raise ValueError(f"frozen_share={frozen_share} must lie between 0 and 1, for example 0.8")
        default_max_turns = 4 * (largest - 1) * (3 if slippery else 1)
        self._sizes = tuple(range(size, largest + 1))
        self._slippery = slippery
        self._max_turns = default_max_turns if max_turns is None else max_turns
        if self._max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1")
        self._num_tasks = {Split.TRAIN: num_train, Split.VALIDATION: num_validation, Split.HELD_OUT: num_held_out}
        self._seed = seed
        self._rules = (f"{RULES} . {SLIPPERY_RULES}" if slippery else RULES) if explain_rules else None
        for split in Split:
            self._check_number_of_tasks(split)
        self._maps: dict[tuple[Split, int], list[Layout]] = {}
        self._more_maps: dict[tuple[Split, int], Iterator[Layout]] = {}
        for split_idx, split in enumerate(Split):
            for map_size in self._sizes:
                rng = np.random.default_rng([seed, split_idx, map_size])
                source = _listed_maps if map_size <= MAX_ENUMERATED_SIZE else _drawn_maps
                self._maps[split, map_size] = []
                self._more_maps[split, map_size] = source(split, map_size, frozen_share, rng)

    @property
    def system_prompt(self) -> str | None:
        return self._rules

    @property
    def max_turns(self) -> int:
        return self._max_turns

    def num_tasks(self, split: Split) -> int:
        return self._num_tasks[split]

    def task(self, split: Split, task_idx: int) -> Task:
        """Maps are made on demand, in order; sizes take turns."""
        if not 0 <= task_idx < self._num_tasks[split]:
            raise IndexError(f"task_idx={task_idx} of split {split.value} is not below num_tasks={self._num_tasks[split]}")
        idx_in_size, size_idx = divmod(task_idx, len(self._sizes))
        size = self._sizes[size_idx]
        maps = self._maps[split, size]
        while len(maps) <= idx_in_size:
            maps.append(next(self._more_maps[split, size]))
        spec: dict[str, object] = {"rows": list(maps[idx_in_size])}
        if self._slippery:
            split_idx = list(Split).index(split)
            spec["slip_seed"] = int(np.random.default_rng([self._seed, split_idx, task_idx]).integers(2**31))
        return Task(task_id=f"frozen_lake/{split.value}/{task_idx}", split=split, spec=json.dumps(spec))

    def make_environment(self) -> FrozenLakeEnvironment:
        return FrozenLakeEnvironment()

    def vocabulary(self) -> Sequence[str]:
        largest = self._sizes[-1]
        words = [*"SFHG/", *ACTIONS, INVALID]
        words += [_position_word(row, col) for row in range(largest) for col in range(largest)]
        kinds = (WALL, *"SFHG")
        for pair in NEIGHBOUR_PAIRS:
            words += [_pair_word(pair, dict(zip(pair, cells, strict=True))) for cells in itertools.product(kinds, repeat=2)]
        words += [] if self._rules is None else self._rules.split()
        return tuple(dict.fromkeys(words))

    def _check_number_of_tasks(self, split: Split) -> None:
        wanted = self._num_tasks[split]
        if wanted < 0:
            raise ValueError(f"num_{split.value}={wanted} must not be negative")
        for size_idx, size in enumerate(self._sizes):
            wanted_of_size = len(range(size_idx, wanted, len(self._sizes)))
            if size <= MAX_ENUMERATED_SIZE and wanted_of_size > len(_all_maps(size)[split]):
                num_all = sum(map(len, _all_maps(size).values()))
                raise ValueError(
                    f"num_{split.value}={wanted} needs {wanted_of_size} distinct {size}x{size} maps, but split {split.value} has "
                    f"{len(_all_maps(size)[split])} of the {num_all} solvable ones; lower num_{split.value} or raise size"
                )


class FrozenLakeEnvironment:
    """One episode; also a Demonstrator, whose expert follows value iteration over gymnasium's own transition table: without slips
    that is a shortest way, with slips the way likeliest to arrive soon."""

    def __init__(self) -> None:
        self._lake: gymnasium.Env[int, int] | None = None
        self._layout: Layout = ()
        self._slippery = False
        self._state = 0

    async def reset(self, task: Task) -> str:
        await self.close()
        spec = json.loads(task.spec)
        self._layout = tuple(spec["rows"])
        self._slippery = "slip_seed" in spec
        self._lake = gymnasium.make(
            "FrozenLake-v1",
            desc=list(self._layout),
            is_slippery=self._slippery,
            max_episode_steps=-1,  # the suite's max_turns is the only cap
            disable_env_checker=True,
        )
        self._state, _ = self._lake.reset(seed=spec.get("slip_seed", 0))
        grid = " / ".join(" ".join(row) for row in self._layout)
        return f"{grid} {self._look()}"

    async def step(self, action: str) -> StepOutcome:
        assert self._lake is not None, "step before reset"
        if action.strip() not in ACTIONS:
            return StepOutcome(observation=f"{INVALID} {self._look()}", reward=0.0, done=False)
        state, reward, done, _, _ = self._lake.step(ACTIONS.index(action.strip()))
        self._state = int(state)
        return StepOutcome(observation=self._look(), reward=float(reward), done=bool(done), success=float(reward) > 0)

    async def close(self) -> None:
        if self._lake is not None:
            self._lake.close()
            self._lake = None

    def expert_action(self) -> str:
        return ACTIONS[_expert_policy(self._layout, self._slippery)[self._state]]

    def random_action(self, rng: np.random.Generator) -> str:
        return ACTIONS[rng.integers(len(ACTIONS))]

    def _look(self) -> str:
        """Position and neighbours, as the agent sees them each turn."""
        size = len(self._layout)
        row, col = divmod(self._state, size)
        neighbours = {}
        for direction, row_step, col_step in NEIGHBOURS:
            r, c = row + row_step, col + col_step
            neighbours[direction] = self._layout[r][c] if 0 <= r < size and 0 <= c < size else WALL
        return " ".join([_position_word(row, col), *(_pair_word(pair, neighbours) for pair in NEIGHBOUR_PAIRS)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Transitions:
    """Where each action can lead: K outcomes for each of S states and A actions."""

    probability: np.ndarray  # [S, A, K]
    next_state: np.ndarray  # [S, A, K]
    reward: np.ndarray  # [S, A, K]
    goes_on: np.ndarray  # [S, A, K], 0 where the episode ends


def _transitions(layout: Layout, slippery: bool) -> _Transitions:
    lake = gymnasium.make("FrozenLake-v1", desc=list(layout), is_slippery=slippery, disable_env_checker=True)
    table = lake.unwrapped.P  # type: ignore[attr-defined]
    lake.close()
    num_states = len(layout) ** 2
    num_outcomes = 3 if slippery else 1
    rows = np.zeros((num_states, len(ACTIONS), num_outcomes, 4))
    for state in range(num_states):
        for action in range(len(ACTIONS)):
            outcomes = table[state][action]  # a hole or the goal has one outcome: it stays there
            rows[state, action, : len(outcomes)] = outcomes
    return _Transitions(
        probability=rows[..., 0], next_state=rows[..., 1].astype(np.int64), reward=rows[..., 2], goes_on=1.0 - rows[..., 3]
    )


@functools.lru_cache(maxsize=4096)
def _expert_policy(layout: Layout, slippery: bool) -> tuple[int, ...]:
    """Best action of each state by value iteration (Sutton & Barto, 2nd edition, section 4.4); the first of equal ones."""
    moves = _transitions(layout, slippery)
    values = np.zeros(len(layout) ** 2)
    while True:
        action_values = (moves.probability * (moves.reward + EXPERT_DISCOUNT * moves.goes_on * values[moves.next_state])).sum(-1)
        new_values = action_values.max(axis=-1)
        if np.abs(new_values - values).max() < EXPERT_TOLERANCE:
            return tuple(int(action) for action in np.round(action_values, 9).argmax(axis=-1))
        values = new_values
