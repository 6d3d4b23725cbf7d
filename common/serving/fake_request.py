"""LiveRequest: a request inside FakeEngine from `add` to its end: where its cache is, and the tokens it has so far.

Decides when a request is finished; where and when it runs is the engine's business.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from common.serving.engine import SampledToken
from common.serving.fake_model import FakeWeights, draw_token, next_token_logits, token_text, uniform_draw
from common.types import Completion, FinishReason, Request


@dataclasses.dataclass(kw_only=True)
class LiveRequest:
    """While it holds a slot its cache lies there; `kept_cache` is a cache that outlived its slot."""

    request: Request
    arrival: int
    slot_idx: int | None = None
    preempted: bool = False
    aborted: bool = False
    stale: bool = False
    """Part of its cache is of older weights."""
    cached_prompt_tokens: int | None = None
    """None until it first runs."""
    kept_cache: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)

    @property
    def context_ids(self) -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.token_ids)

    def sample(self, weights: FakeWeights, version: int, context_hash: int) -> SampledToken:
        """Draw and record the token after the context with this hash."""
        params = self.request.sampling
        draw = uniform_draw(self.request.key, len(self.token_ids))
        token_id, logprobs = draw_token(next_token_logits(weights, context_hash), params, draw)
        logprob = float(logprobs[token_id])
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        top: tuple[tuple[int, float], ...] = ()
        if params.num_top_logprobs:
            best = np.argsort(-logprobs, kind="stable")[: params.num_top_logprobs]
            top = tuple((int(idx), float(logprobs[idx])) for idx in best)
            self.top_logprobs.append(top)
        return SampledToken(
            request_id=self.request.request_id,
            token_id=token_id,
            behavior_logprob=logprob,
            weight_version=version,
            top_logprobs=top,
        )

    def finish_reason(self) -> FinishReason | None:
        """Why it ends with the newest token, or None if it goes on."""
        params = self.request.sampling
        if self.token_ids[-1] in params.stop_token_ids or self._completed_stop_string():
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) == params.max_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids),
            behavior_logprobs=tuple(self.logprobs),
            weight_versions=tuple(self.versions),
            finish_reason=reason,
            cached_prompt_tokens=self.cached_prompt_tokens or 0,
            top_logprobs=tuple(self.top_logprobs),
        )

    def digest_fields(self) -> tuple[object, ...]:
        """Its state as plain values, for comparing ranks."""
        place = (self.request.request_id, self.arrival, self.slot_idx, self.preempted, self.aborted, self.stale)
        return (*place, self.cached_prompt_tokens, self.kept_cache, self.token_ids, self.versions)

    def _completed_stop_string(self) -> bool:
        """Whether the newest token completed one of the stop strings, which may span tokens."""
        stops = self.request.sampling.stop_strings
        if not stops:
            return False
        text = "".join(token_text(token_id) for token_id in self.token_ids)
        before = len(text) - len(token_text(self.token_ids[-1]))
        return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in stops)
