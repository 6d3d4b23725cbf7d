"""From sampled tokens to text as it can be shown: whole characters only, and nothing from a stop string on.

Invariant: the pieces of a text that holds no stop string add up to what its tokens add to the prompt's text when all are decoded
at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.rollout.chat import ChatTokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""How a decoder shows bytes that are no character, or not yet."""
NUM_CONTEXT_TOKENS = 6
"""Of the prompt: whether a token's text begins with a space may depend on what stands before it."""
MAX_PENDING_TOKENS = 32
"""Tokens held back for a character to be completed; a character has four bytes, so more of them are no text at all."""


class IncrementalText:
    """Decodes token by token. Text that ends in an incomplete character is held back until it is complete, or `finish`."""

    def __init__(self, tokenizer: ChatTokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = tokenizer.decode
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_before = len(self._token_ids)  # of them, those that only give the new ones their left context
        self._shown = len(self._decode(self._token_ids))  # characters of their text that were given out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; often none."""
        self._token_ids += token_ids
        text = self._decode(self._token_ids)
        num_new = len(self._token_ids) - self._num_before
        if text.endswith(REPLACEMENT) and num_new < MAX_PENDING_TOKENS:
            return ""
        return self._give(text)

    def finish(self) -> str:
        """What was held back."""
        return self._give(self._decode(self._token_ids))

    def _give(self, text: str) -> str:
        new = text[self._shown :]
        if new:  # what is new is the context of what comes; tokens without text (special ones) are no context
            self._token_ids = self._token_ids[self._num_before :]
        self._num_before = len(self._token_ids)
        self._shown = len(self._decode(self._token_ids))
        return new


class StopStrings:
    """Passes text on up to the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string ended it."""
        text = self._held + text
        found = [idx for idx in (text.find(stop) for stop in self._stops) if idx >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are a beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def token_text(tokenizer: ChatTokenizer, token_id: int) -> str:
    """How a single token is written in lists of log-probabilities; OpenAI's form for parts of characters."""
    content = tokenizer.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)
