"""A request inside the engine: its tokens, the pages it holds, how far its cache is computed.

Invariant: the cache holds keys and values of context[:num_computed], and num_computed < len(context), since the newest token
is only computed by the step that samples its successor.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from common.types import Completion, FinishReason, Request
from rose_jax.jetstream.pages import Node, PagePool

MAX_DEVICE_STOPS = 4
"""Stop tokens that the device looks for by itself. A request with more of them generates one token a step."""


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """See the module. `slot_idx` is None while it waits; `pool` is None while it holds no pages.

    `node` is the prefix node of its first `num_registered` pages; None once its cache mixes weight versions and must not be shared.
    `has_options`: drawing for it takes more than a temperature. `runs_ahead`: it may draw several tokens in one step.
    `purged`: it met logits that were not finite, and is computed again over a clean cache.
    """

    request: Request
    arrival: int
    context: list[int]
    priority: int
    has_options: bool
    runs_ahead: bool
    slot_idx: int | None = None
    preempted: bool = False
    aborted: bool = False
    purged: bool = False
    pool: PagePool | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    node: Node | None = None
    num_registered: int = 0
    cached_prompt_tokens: int | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)

    @classmethod
    def start(cls, request: Request, *, arrival: int) -> Sequence:
        params = request.sampling
        has_options = params.top_p < 1.0 or params.min_p > 0.0 or params.top_k is not None or params.num_top_logprobs > 0
        return cls(
            request=request,
            arrival=arrival,
            context=list(request.prompt_token_ids),
            priority=request.priority,
            has_options=has_options,
            runs_ahead=not (has_options or params.stop_strings or len(params.stop_token_ids) > MAX_DEVICE_STOPS),
        )

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Place in line: by priority, then those that were preempted, then by arrival."""
        return (-self.priority, not self.preempted, self.arrival)

    @property
    def num_remaining(self) -> int:
        """Tokens to compute until the next one can be sampled."""
        return len(self.context) - self.num_computed

    @property
    def decodes_next(self) -> bool:
        return len(self.context) - self.num_computed == 1 and bool(self.token_ids)

    def completion(self, reason: FinishReason, *, error: str | None = None) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            behavior_logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.versions),
            finish_reason=reason,
            cached_prompt_tokens=self.cached_prompt_tokens or 0,
            top_logprobs=tuple(self.top_logprobs),
            error=error,
        )


class Piece(NamedTuple):
    """A sequence's share of one step: context[start:end], and, if the context ends there, up to `max_draws` tokens after it."""

    sequence: Sequence
    start: int
    end: int
    decodes: bool
    max_draws: int
