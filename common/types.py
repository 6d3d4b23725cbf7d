"""The nouns of the system: requests, completions, trajectories, groups.

Host-side records are frozen and keyword-only; verbs live elsewhere. Token sequences are ids throughout: text is decoded for the
environment and never encoded again (a second encoding need not give the same ids).
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from jaxtyping import Bool, Float32, Int32


class Split(enum.StrEnum):
    """Disjoint sets of tasks: what is trained on, what stops the warm-up, what success is reported on."""

    TRAIN = "train"
    VALIDATION = "validation"
    HELD_OUT = "held_out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One problem of an environment. `spec` is the environment's own text and says all there is about it."""

    task_id: str
    split: Split
    spec: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingKey:
    """Where a completion's random numbers come from: never from slot, replica or batch.

    With the position (number of tokens already sampled for this request) it determines the random draw of one token, so that a
    turn sampled anywhere, or cut and resumed, draws the same.
    """

    run_seed: int
    trajectory_id: int
    turn_idx: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. temperature 0 is greedy; `max_tokens` counts sampled tokens, the stop token included.

    `behavior_logprobs` are those of the distribution the token was drawn from at temperature 1 for greedy decoding, else at
    `temperature` and before top-p, top-k and min-p cut it: the distribution a policy gradient needs.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_top_logprobs: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One completion to generate: one turn of a trajectory, or one online call. Higher `priority` goes first.

    Cached prefixes are shared within one `cache_namespace` and never across.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    key: SamplingKey
    priority: int = 0
    cache_namespace: str = ""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The one final answer to a request. An aborted or failed one keeps the tokens it has.

    token_ids, behavior_logprobs and weight_versions have one entry for each sampled token, the stop token included.
    """

    request_id: str
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    cached_prompt_tokens: int = 0
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    error: str | None = None


class EpisodeEnd(enum.StrEnum):
    """Why an episode ended. Only DONE is the environment's own end; FAILED carries no usable data."""

    DONE = "done"
    TURN_CAP = "turn_cap"
    CONTEXT_FULL = "context_full"
    TURN_TIMEOUT = "turn_timeout"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What one turn looked like, for reports: text in, text out, and the completion's span in the trajectory's token_ids."""

    observation: str
    action: str
    reward: float
    start_token_idx: int
    end_token_idx: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """One episode as the learner sees it: prompt and observations interleaved with the agent's own tokens, T in all.

    Where `loss_mask` is False (tokens the agent did not write), `behavior_logprobs` and `weight_versions` are 0 and mean nothing.
    """

    trajectory_id: int
    group_id: int
    task: Task
    token_ids: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    behavior_logprobs: Float32[np.ndarray, "T"]
    weight_versions: Int32[np.ndarray, "T"]
    reward: float
    success: bool
    end: EpisodeEnd
    turns: tuple[Turn, ...]
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All trajectories of one prompt that are scored against each other."""

    group_id: int
    task: Task
    trajectories: tuple[Trajectory, ...]
