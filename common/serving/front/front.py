"""Front: what every interface of one server shares, whatever protocol brings a call in."""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Sequence

from common.rollout.chat import ChatTokenizer
from common.serving.front.access import Client, ConcurrencyLimit, Tokens
from common.serving.front.calls import Calls
from common.serving.front.engine_client import EngineClient
from common.serving.front.errors import ApiError
from common.serving.front.metrics import Metrics
from common.types import Request, SamplingKey, SamplingParams

ONLINE_PRIORITY = 1
"""Rollouts have 0: whoever waits for an answer now goes first."""
POLICY = "policy"
"""Name of the model in training where it is not the one that is served."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client and one request may take."""

    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    """None: as many as the context holds."""
    max_completions_per_client: int = 1024


@dataclasses.dataclass(kw_only=True)
class Front:
    """See the module."""

    engine: EngineClient
    rollout_engine: EngineClient
    """Of rollouts and control: the same one, or where two models share the device that of the policy."""
    tokenizer: ChatTokenizer
    model_name: str
    tokens: Tokens
    limits: Limits
    calls: Calls
    metrics: Metrics
    concurrency: ConcurrencyLimit
    started_s: int

    @classmethod
    def make(
        cls,
        engine: EngineClient,
        tokenizer: ChatTokenizer,
        *,
        model_name: str,
        tokens: Tokens,
        limits: Limits,
        rollout_engine: EngineClient | None = None,
    ) -> Front:
        """`rollout_engine`: None, if one model serves everybody."""
        return cls(
            engine=engine,
            rollout_engine=rollout_engine or engine,
            tokenizer=tokenizer,
            model_name=model_name,
            tokens=tokens,
            limits=limits,
            calls=Calls(),
            metrics=Metrics(engine, rollout_engine),
            concurrency=ConcurrencyLimit(limits.max_completions_per_client),
            started_s=int(time.time()),
        )

    @property
    def rollout_model_name(self) -> str:
        """What the model of rollouts is called in reports."""
        return self.model_name if self.rollout_engine is self.engine else POLICY

    @property
    def fingerprint(self) -> str:
        """What, besides the seed, an answer depends on: the engine and the version of its weights."""
        return f"{self.engine.info.name}-v{self.engine.load.weight_version}"

    def check_prompt(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raises ApiError if a prompt is empty or longer than a client may send."""
        longest = self.limits.max_prompt_tokens
        if not token_ids:
            raise ApiError(400, f"'{param}' is empty; send at least one token.", param=param)
        if longest is not None and len(token_ids) > longest:
            message = f"'{param}' has {len(token_ids)} tokens, this server takes {longest}; shorten it."
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    def max_completion_tokens(self, num_prompt_tokens: int, *, param: str) -> int:
        """Tokens that the context leaves for a completion. Raises ApiError if there are none."""
        longest = self.engine.info.max_context_tokens
        if num_prompt_tokens >= longest:
            message = f"'{param}' has {num_prompt_tokens} tokens, which leaves no room in the context of {longest}; shorten it."
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return longest - num_prompt_tokens

    def online_requests(
        self, client: Client, prompts: Sequence[Sequence[int]], n: int, sampling: Sequence[SamplingParams], seed: int | None
    ) -> list[Request]:
        """One request for each choice, those of a prompt together; `sampling` has one entry a prompt. Draws depend on `seed` alone
        if it is given."""
        drawn = secrets.randbits(64) if seed is None else seed % 2**64
        return [
            Request(
                request_id="",  # the client of the engine assigns it
                prompt_token_ids=tuple(prompt),
                sampling=params,
                key=SamplingKey(run_seed=drawn % 2**32, trajectory_id=drawn >> 32, turn_idx=prompt_idx * n + choice_idx),
                priority=ONLINE_PRIORITY,
                cache_namespace=client.cache_namespace,
            )
            for prompt_idx, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
            for choice_idx in range(n)
        ]
