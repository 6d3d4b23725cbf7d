"""What serving engines are compared on: streams that send their next request when the last one is answered.

Plain values and numpy, so that a client in another process runs the very same requests.
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request of a stream. `stream_idx` names the stream that waits for it."""

    stream_idx: int
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclasses.dataclass(kw_only=True)
class Timing:
    """Seconds on one clock; `num_tokens` counts generated tokens."""

    sent_s: float
    first_token_s: float = 0.0
    num_tokens: int = 0


class ClosedLoop:
    """N streams of `turns` requests. With several turns, each prompt is the last one, its completion and some new tokens.

    `shared_tokens` begin the prompts of all streams, as a group's task or a system prompt does.
    """

    def __init__(
        self,
        *,
        streams: int,
        turns: int,
        shared_tokens: int,
        new_tokens: int,
        max_tokens: int,
        vocab_size: int,
        grow: bool,
        seed: int,
    ) -> None:
        self.streams, self.turns, self.max_tokens, self._grow = streams, turns, max_tokens, grow
        rng = np.random.default_rng(seed)
        self._new = rng.integers(0, vocab_size, (streams, turns, new_tokens)).tolist()
        self._shared = rng.integers(0, vocab_size, shared_tokens).tolist()
        self._turn_idx = [0] * streams
        self._context: list[list[int]] = [list(self._shared) for _ in range(streams)]

    def start(self) -> list[Prompt]:
        return [self._prompt(stream_idx) for stream_idx in range(self.streams)]

    def answered(self, stream_idx: int, token_ids: list[int]) -> Prompt | None:
        """The stream's next request, or None when it is done."""
        self._turn_idx[stream_idx] += 1
        if self._turn_idx[stream_idx] == self.turns:
            return None
        if self._grow:
            self._context[stream_idx] += token_ids
        else:
            self._context[stream_idx] = list(self._shared)
        return self._prompt(stream_idx)

    def _prompt(self, stream_idx: int) -> Prompt:
        self._context[stream_idx] += self._new[stream_idx][self._turn_idx[stream_idx]]
        return Prompt(stream_idx=stream_idx, token_ids=tuple(self._context[stream_idx]), max_tokens=self.max_tokens)
