"""What online requests are promised: time to first token and time per output token, by model and class of request.

Pure values. A request's TPOT is the mean over its tokens after the first; TTFT counts from arrival. Invariant: every class of a
model that can be named has an objective, so that no live request is without one.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping

ANY_CLASS = "any"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
    """Seconds; a request that is slower has missed it."""

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.tpot_s > 0):
            raise ValueError(f"{self}: objectives must be greater than 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objectives:
    """By model, then by class of request; `ANY_CLASS` holds for classes that are not named."""

    by_model: Mapping[str, Mapping[str, Objective]]

    def __post_init__(self) -> None:
        for model, by_class in self.by_model.items():
            if not by_class:
                raise ValueError(f"model {model!r} has no objective; give it one under {ANY_CLASS!r}")
        if not self.by_model:
            raise ValueError("there is no objective; give at least one model one")

    @classmethod
    def of(cls, model: str, objective: Objective) -> Objectives:
        """One objective for all requests of a model."""
        return cls(by_model={model: {ANY_CLASS: objective}})

    def of_request(self, model: str, request_class: str) -> Objective:
        by_class = self.by_model.get(model)
        if by_class is None:
            raise ValueError(f"there is no objective for model {model!r}, only for {', '.join(self.by_model)}")
        found = by_class.get(request_class) or by_class.get(ANY_CLASS)
        if found is None:
            raise ValueError(
                f"model {model!r} has no objective for class {request_class!r}, only for {', '.join(by_class)}; "
                f"name it or give one under {ANY_CLASS!r}"
            )
        return found

    @property
    def shortest_ttft_s(self) -> float:
        return min(objective.ttft_s for by_class in self.by_model.values() for objective in by_class.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthClasses:
    """Classes of requests by prompt length: class i holds prompts of at most `bounds[i]` tokens, the last one all longer ones."""

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.bounds) != sorted(set(self.bounds)):
            raise ValueError(f"bounds={self.bounds} must ascend")

    def index_of(self, prompt_tokens: int) -> int:
        return bisect.bisect_left(self.bounds, prompt_tokens)

    def class_of(self, prompt_tokens: int) -> str:
        return f"length{self.index_of(prompt_tokens)}"
