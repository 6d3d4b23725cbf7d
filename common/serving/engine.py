"""StepEngine: the one contract between whoever drives a device and whatever runs the model on it.

An engine does nothing by itself: no thread, no clock. Its driver asks for a plan under limits, submits it, collects the result.
At most one step is submitted per device at a time; a commit of weights, a switch to another model or a park happens only after
`drain`. On two CPU cores submit-then-collect is simply a step; on a TPU or GPU dispatch returns before the device is done, and in
a multi-process engine rank 0 plans and sends the plan, which is why a plan is a plain value and followers read no clock.

Every method is called from one thread. Invariant: each request that `add` accepted ends with exactly one Completion, in the
StepResult of some `collect` or `drain`, whatever happens in between.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol, TypeVar

from common.types import Completion, Request


class StaleCache(enum.StrEnum):
    """What a commit of new weights does to keys and values of older weights. An engine honours it, or refuses it at start.

    KEEP: everything stays in use; later tokens look at a mixture of versions. DROP: all of it is given up, that of running
    requests too, which is then computed again. TAG: running requests go on with what they have; no other request is ever given
    cached state of another version.
    """

    KEEP = "keep"
    DROP = "drop"
    TAG = "tag"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLimits:
    """How much one step may hold: at most `max_tokens` tokens, decoded ones plus those of the prefill chunks.

    A decoding sequence generates one token, or up to `tokens_per_sequence` one after the other: less host work for each, but
    whatever arrives meanwhile waits for all of them. An engine may always do fewer.
    """

    max_tokens: int
    tokens_per_sequence: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """`num_tokens` prompt tokens of a request from position `start` on, computed into `slot_idx`."""

    request_id: str
    slot_idx: int
    start: int
    num_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeEntry:
    """Up to `num_tokens` tokens for a running request whose cache holds `context_tokens` tokens before the step."""

    request_id: str
    slot_idx: int
    context_tokens: int
    num_tokens: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step will compute. Made of plain values only, so that it can be sent to other processes or logged."""

    step_id: int
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeEntry, ...]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefill)

    @property
    def decode_context_tokens(self) -> int:
        return sum(entry.context_tokens for entry in self.decode)

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + sum(entry.num_tokens for entry in self.decode)

    @property
    def computed(self) -> tuple[int, int, int]:
        """(prefill tokens, decoded tokens, cached tokens that those look at) as the device computes them, padding included.

        For predicting how long the step takes; the last one may be in units of the engine's own, the same for all its plans.
        """
        decode_tokens = sum(entry.num_tokens for entry in self.decode)
        return self.prefill_tokens, decode_tokens, sum(entry.context_tokens * entry.num_tokens for entry in self.decode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledToken:
    """One token as it leaves a step, for callers that stream. `top_logprobs` are its position's, as many as were asked for."""

    request_id: str
    token_id: int
    behavior_logprob: float
    weight_version: int
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step produced: its tokens, the requests it ended, and the seconds the device spent on it."""

    step_id: int
    tokens: tuple[SampledToken, ...]
    completions: tuple[Completion, ...]
    device_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """What does not change while an engine lives. max_context_tokens counts prompt and completion together."""

    name: str
    vocab_size: int
    max_slots: int
    max_context_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """What an engine holds at this moment; token counts are of the key-value cache.

    `reclaimable_cache_tokens` are those that no request needs: prefixes kept for reuse, outside `used_cache_tokens`.
    """

    running_requests: int
    waiting_requests: int
    used_cache_tokens: int
    capacity_cache_tokens: int
    weight_version: int
    reclaimable_cache_tokens: int = 0


WeightsT = TypeVar("WeightsT", contravariant=True)


class StepEngine(Protocol[WeightsT]):
    """See the module. WeightsT is what `commit` takes: the form in which this engine's weights arrive."""

    @property
    def info(self) -> EngineInfo: ...

    def load(self) -> EngineLoad:
        """Never blocks; may be called while a step is on the device."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request; it may run from the next plan on. Does not block.

        Raises:
            RequestRejectedError: the request can never run here. Nothing was queued and no Completion will come.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request with the tokens it has (FinishReason.ABORTED), in the next result. Unknown or ended ids change nothing."""
        ...

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        """Take a running request off its slot; it stays queued, before its equals, and later goes on from the same state.

        With keep_cache=False its cache is given up and computed again on resume. Call only when no step is submitted. Unknown,
        waiting or ended ids change nothing.
        """
        ...

    def plan(self, limits: StepLimits) -> StepPlan | None:
        """Choose the next step's work, or None when there is none. Changes nothing that another plan would not undo."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Start the newest plan on the device. May return before the device is done. At most one step may be in flight."""
        ...

    def collect(self) -> StepResult:
        """Wait for the submitted step, or report ends that needed no step. An assertion fails if nothing was submitted."""
        ...

    def drain(self) -> StepResult | None:
        """Wait until the device holds no work of this engine. Returns what that brought, or None. Idempotent."""
        ...

    def commit(self, weights: WeightsT, *, version: int) -> None:
        """Swap in new weights between two steps: call after `drain`. Tokens sampled from then on carry `version`.

        If it raises, the old weights and version are whole and serving goes on.
        """
        ...

    def close(self) -> None:
        """Free the device. Idempotent; no call may follow."""
        ...
