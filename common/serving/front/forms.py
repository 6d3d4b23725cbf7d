"""How a generation's pieces look in OpenAI's API: text completions and chat completions, whole and as streamed events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from common.rollout.chat import ChatTokenizer
from common.serving.engine import SampledToken
from common.serving.front.generation import Piece
from common.serving.front.text import token_text

Header = Callable[[], dict[str, Any]]
"""Fields that every answer of one call begins with."""


class CompletionForm:
    """/v1/completions. `num_top` is None without log-probabilities; `prefixes` stand before the text of each choice."""

    def __init__(self, *, header: Header, tokenizer: ChatTokenizer, num_top: int | None, prefixes: Sequence[str]) -> None:
        self._header, self._tokenizer, self._num_top, self._prefixes = header, tokenizer, num_top, prefixes
        self._offsets = [0] * len(prefixes)  # characters of each choice that came before its next piece

    def first_events(self, choice_idx: int) -> list[dict[str, Any]]:
        prefix = self._prefixes[choice_idx]
        return [self._event(choice_idx, prefix, None, None)] if prefix else []

    def event(self, piece: Piece) -> dict[str, Any]:
        return self._event(piece.choice_idx, piece.text, self._logprobs([piece]), piece.finish_reason)

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._body([]) | {"usage": usage}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            self._choice(
                choice_idx,
                self._prefixes[choice_idx] + "".join(piece.text for piece in of_choice),
                self._logprobs(of_choice),
                of_choice[-1].finish_reason,
            )
            for choice_idx, of_choice in enumerate(pieces)
        ]
        return self._body(choices) | {"usage": usage}

    def _event(self, choice_idx: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return self._body([self._choice(choice_idx, text, logprobs, finish_reason)])

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._header() | {"object": "text_completion", "choices": choices}

    @staticmethod
    def _choice(choice_idx: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
        return {"index": choice_idx, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        """The four parallel lists of the older API. A token's offset is that of the piece that it came in."""
        if self._num_top is None:
            return None
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            for token in piece.tokens:
                text = token_text(self._tokenizer, token.token_id)
                top = {token_text(self._tokenizer, token_id): value for token_id, value in reversed(token.top_logprobs)}
                lists["tokens"].append(text)
                lists["token_logprobs"].append(token.behavior_logprob)
                lists["top_logprobs"].append(top | {text: token.behavior_logprob})
                lists["text_offset"].append(self._offsets[piece.choice_idx])
            self._offsets[piece.choice_idx] += len(piece.text)
        return lists | ({} if self._num_top else {"top_logprobs": None})


class ChatForm:
    """/v1/chat/completions. `num_top` is None without log-probabilities."""

    def __init__(self, *, header: Header, tokenizer: ChatTokenizer, num_top: int | None) -> None:
        self._header, self._tokenizer, self._num_top = header, tokenizer, num_top

    def first_events(self, choice_idx: int) -> list[dict[str, Any]]:
        return [self._chunk(choice_idx, {"role": "assistant", "content": ""}, None, None)]

    def event(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        return self._chunk(piece.choice_idx, delta, self._logprobs([piece]), piece.finish_reason)

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return self._header() | {"object": "chat.completion.chunk", "choices": [], "usage": usage}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": choice_idx,
                "message": {"role": "assistant", "content": "".join(piece.text for piece in of_choice), "refusal": None},
                "logprobs": self._logprobs(of_choice),
                "finish_reason": of_choice[-1].finish_reason,
            }
            for choice_idx, of_choice in enumerate(pieces)
        ]
        return self._header() | {"object": "chat.completion", "choices": choices, "usage": usage}

    def _chunk(
        self, choice_idx: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"index": choice_idx, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._header() | {"object": "chat.completion.chunk", "choices": [choice]}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return {"content": [self._token(token) for piece in pieces for token in piece.tokens], "refusal": None}

    def _token(self, token: SampledToken) -> dict[str, Any]:
        top = [self._entry(token_id, value) for token_id, value in token.top_logprobs]
        return self._entry(token.token_id, token.behavior_logprob) | {"top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._tokenizer, token_id),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }
