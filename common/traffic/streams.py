"""RolloutStreams: rollouts that never run short, as requests: each stream plays one multi-turn trajectory after the other.

A turn's prompt is the last one's, the tokens it was answered with, and some new ones, as an environment gives them. The same
streams with the same seed ask for the same lengths, whoever serves them. Pure: it sends nothing. Invariant: a stream has exactly
one request open at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from common.types import Completion, Request, SamplingKey, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrajectoryLengths:
    """Tokens of the first prompt; then of each turn those generated, and between two turns those that the environment adds."""

    prompt_tokens: int
    turn_tokens: tuple[int, ...]
    new_tokens: int

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + sum(self.turn_tokens) + self.new_tokens * (len(self.turn_tokens) - 1)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Stream:
    rng: np.random.Generator
    lengths: TrajectoryLengths
    context: tuple[int, ...] = ()
    num_trajectories: int = 0
    turn_idx: int = 0


class RolloutStreams:
    """See the module. `vocab_size` bounds the token ids it makes up."""

    def __init__(self, num_streams: int, lengths: Sequence[TrajectoryLengths], *, vocab_size: int, seed: int) -> None:
        if num_streams < 1 or not lengths:
            raise ValueError(f"num_streams={num_streams} and {len(lengths)} trajectories to choose from: both must be at least 1")
        self._lengths, self._vocab_size, self._seed = tuple(lengths), vocab_size, seed
        rngs = [np.random.default_rng([seed, stream_idx]) for stream_idx in range(num_streams)]
        self._streams = [_Stream(rng=rng, lengths=lengths[0]) for rng in rngs]
        self.generated_tokens = 0

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self) -> list[Request]:
        """The first request of every stream."""
        return [self._begin(stream_idx) for stream_idx in range(self.num_streams)]

    def next(self, completion: Completion) -> Request:
        """What the stream asks for after one of its requests was answered; after an aborted one the same again."""
        stream_idx = int(completion.request_id.partition(".")[0])
        stream = self._streams[stream_idx]
        self.generated_tokens += len(completion.token_ids)
        asked = stream.lengths.turn_tokens[stream.turn_idx]
        if len(completion.token_ids) < asked:
            return self._begin(stream_idx)
        stream.turn_idx += 1
        if stream.turn_idx == len(stream.lengths.turn_tokens):
            return self._begin(stream_idx)
        stream.context += completion.token_ids + self._draw(stream, stream.lengths.new_tokens)
        return self._request(stream_idx)

    def _begin(self, stream_idx: int) -> Request:
        stream = self._streams[stream_idx]
        stream.lengths = self._lengths[int(stream.rng.integers(len(self._lengths)))]
        stream.context = self._draw(stream, stream.lengths.prompt_tokens)
        stream.num_trajectories += 1
        stream.turn_idx = 0
        return self._request(stream_idx)

    def _draw(self, stream: _Stream, num_tokens: int) -> tuple[int, ...]:
        return tuple(stream.rng.integers(0, self._vocab_size, num_tokens).tolist())

    def _request(self, stream_idx: int) -> Request:
        stream = self._streams[stream_idx]
        trajectory_id = stream_idx + self.num_streams * stream.num_trajectories
        return Request(
            request_id=f"{stream_idx}.{stream.num_trajectories}.{stream.turn_idx}",
            prompt_token_ids=stream.context,
            sampling=SamplingParams(max_tokens=stream.lengths.turn_tokens[stream.turn_idx]),
            key=SamplingKey(run_seed=self._seed, trajectory_id=trajectory_id, turn_idx=stream.turn_idx),
            cache_namespace="rollout",
        )
