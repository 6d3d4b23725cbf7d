"""Generation: one call of a client, of one or several completions, as pieces of text with their tokens.

Stop strings are found here, where the text is, and end the completion in the engine. A reader that is slow gets fewer, larger
pieces; what waits for it is bounded by the tokens it asked for. Use as a context manager: whatever happens in it, no completion
goes on in the engine afterwards. Invariant: every choice ends with exactly one piece that has a finish reason, or the call raises.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

from common.rollout.chat import ChatTokenizer
from common.serving.engine import SampledToken
from common.serving.front.engine_client import Ended, EngineClient
from common.serving.front.errors import ApiError, unavailable
from common.serving.front.metrics import CallMetrics
from common.serving.front.text import IncrementalText, StopStrings
from common.types import FinishReason, Request

FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What is new of one choice; `finish_reason` comes with its last piece."""

    choice_idx: int
    text: str
    tokens: tuple[SampledToken, ...]
    finish_reason: str | None = None


@dataclasses.dataclass(kw_only=True)
class _Choice:
    text: IncrementalText
    stops: StopStrings
    request_id: str | None = None
    tokens: list[SampledToken] = dataclasses.field(default_factory=list)
    end: Ended | None = None
    done: bool = False


class Generation:
    """See the module.

    Args:
        requests: one for each choice.
        stops: strings that end a completion and are not shown.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: ChatTokenizer,
        requests: Sequence[Request],
        *,
        stops: Sequence[str],
        metrics: CallMetrics,
    ) -> None:
        self._engine, self._requests, self._metrics = engine, requests, metrics
        self._choices = [
            _Choice(text=IncrementalText(tokenizer, request.prompt_token_ids), stops=StopStrings(stops)) for request in requests
        ]
        self._news: set[int] = set()
        self._arrived = asyncio.Event()
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.weight_version: int | None = None

    def __enter__(self) -> Generation:
        for idx, request in enumerate(self._requests):
            self._choices[idx].request_id = self._engine.start(request, self._listener(idx), stream=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for choice in self._choices:
            if choice.end is None and choice.request_id is not None:
                self._engine.abort(choice.request_id)
        self._metrics.finish(error, num_cached_tokens=self.num_cached_tokens)

    async def pieces(self) -> AsyncIterator[Piece]:
        """All choices' pieces as they come.

        Raises:
            Exception: what the engine refused a request with, or ApiError for a completion that failed.
        """
        num_open = len(self._choices)
        while num_open:
            await self._arrived.wait()
            self._arrived.clear()
            news, self._news = sorted(self._news), set()
            for idx in news:
                piece = self._take(idx)
                if piece is not None:
                    num_open -= piece.finish_reason is not None
                    yield piece

    def _listener(self, idx: int) -> Callable[[SampledToken | Ended], None]:
        choice = self._choices[idx]

        def on_event(event: SampledToken | Ended) -> None:
            if isinstance(event, Ended):
                choice.end = event
            else:
                choice.tokens.append(event)
                self._metrics.token()
            self._news.add(idx)
            self._arrived.set()

        return on_event

    def _take(self, idx: int) -> Piece | None:
        """What has come of a choice since the last time; None when it shows nothing."""
        choice = self._choices[idx]
        if choice.done:
            return None
        tokens, choice.tokens = tuple(choice.tokens), []
        if choice.end is not None and choice.end.error is not None:
            raise choice.end.error
        finish_reason = self._finish_reason(choice)
        shown, text = 0, ""
        for token in tokens:  # one by one: none behind a stop string counts
            shown += 1
            new, stopped = choice.stops.push(choice.text.push([token.token_id]))
            text += new
            if stopped:
                finish_reason = "stop"
                break
        else:
            if finish_reason is not None:
                new, stopped = choice.stops.push(choice.text.finish())
                text += new
                if not stopped:
                    text += choice.stops.finish()
        self.num_completion_tokens += shown
        if tokens:
            self.weight_version = tokens[-1].weight_version
        if finish_reason is not None:
            choice.done = True
            if choice.end is None and choice.request_id is not None:
                self._engine.abort(choice.request_id)
        if not text and not shown and finish_reason is None:
            return None
        return Piece(choice_idx=idx, text=text, tokens=tokens[:shown], finish_reason=finish_reason)

    def _finish_reason(self, choice: _Choice) -> str | None:
        """Raises ApiError if the completion failed."""
        if choice.end is None:
            return None
        completion = choice.end.completion
        assert completion is not None
        if completion.finish_reason is FinishReason.ERROR:
            reason = completion.error or "the engine gave no reason"
            text = reason.partition(": ")[2] or reason  # without the engine's own request id
            raise ApiError(500, f"the completion failed: {text}", kind="server_error", code="completion_failed")
        if completion.finish_reason is FinishReason.ABORTED:
            raise unavailable("the completion was aborted: the server stops or the engine gave it up; send it again")
        self.num_cached_tokens += completion.cached_prompt_tokens
        return FINISH_REASONS[completion.finish_reason]
