"""The environment contract: text in, text out, one episode per Environment object.

A TaskSuite is what a config names as `module:Class`. It owns the tasks (training, validation and held-out ones are disjoint), makes
environments, and may offer demonstrations. It is built once per process with the config's `env.options` as keyword arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np

from common.types import Split, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutcome:
    """What an action led to. `observation` is ignored when `done`."""

    observation: str
    reward: float
    done: bool
    success: bool = False


class Environment(Protocol):
    """One episode. An action that cannot be understood is the environment's to answer (with words, a penalty, or the end)."""

    async def reset(self, task: Task) -> str:
        """Start the task and return the first observation."""
        ...

    async def step(self, action: str) -> StepOutcome:
        """Carry out one action. Raises only if the environment itself broke."""
        ...

    async def close(self) -> None:
        """Free what the episode holds. Idempotent."""
        ...


@runtime_checkable
class Demonstrator(Protocol):
    """An Environment that can also show what to do; used for the supervised warm-up."""

    def expert_action(self) -> str:
        """The action an expert takes in the current state."""
        ...

    def random_action(self, rng: np.random.Generator) -> str:
        """A valid action drawn at random."""
        ...


class TaskSuite(Protocol):
    """The tasks of one environment and how to play them."""

    @property
    def system_prompt(self) -> str | None:
        """Said once at the head of each episode, or None."""
        ...

    @property
    def max_turns(self) -> int: ...

    def num_tasks(self, split: Split) -> int: ...

    def task(self, split: Split, task_idx: int) -> Task:
        """Task `task_idx` (0 <= task_idx < num_tasks(split)) of a split: always the same one."""
        ...

    def make_environment(self) -> Environment: ...

    def vocabulary(self) -> Sequence[str]:
        """All words that observations and actions are made of, for models trained from nothing."""
        ...


def load_task_suite(factory: str, options: Mapping[str, object]) -> TaskSuite:
    """Import `module:Class` and build it with `options`.

    Raises:
        ValueError: the name has no such form, the module or class does not exist, or it does not take these options.
    """
    module_name, colon, class_name = factory.partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(f"env.factory={factory!r} must have the form module:Class, for example my_envs.maze:MazeSuite")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"env.factory={factory!r}: cannot import {error.name!r}; put its folder on PYTHONPATH or mend the name"
        ) from error
    suite_class = getattr(module, class_name, None)
    if not inspect.isclass(suite_class):
        raise ValueError(f"env.factory={factory!r}: {module_name} has no class {class_name!r}")
    try:
        inspect.signature(suite_class).bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(suite_class).parameters)
        raise ValueError(f"env.options={dict(options)} do not fit {factory}: {error}; it takes ({known})") from error
    return cast(TaskSuite, suite_class(**options))
