"""The shape of a JetStream engine: slots, pages, chunks, and the few array shapes its steps are compiled for.

Steps are padded up to the next bucket of rows (one per sequence that samples), prefill tiles and context length, so the number of
programs is the product of three short lists and warm-up can compile them all. Validated once, on construction.
"""

from __future__ import annotations

import dataclasses
import itertools

from common.serving.engine import StaleCache

BUCKET_RATIO = 4
"""Neighbouring buckets differ by this factor: a step computes at most so many times what it needs, and log(size) programs exist."""
SMALLEST_SHARE = 16
"""The smallest bucket of rows and tiles is this part of the largest: a program takes a second or more to compile."""
SMALLEST_CONTEXT_BUCKET = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class JetStreamConfig:
    """See the module.

    Args:
        page_tokens: tokens of a cache page, the unit of allocation and of prefix reuse.
        num_chunks: equal arrays the cache of each layer is cut into; a request lives in one of them.
        pages_per_chunk: pages of one chunk; default: every slot can be full.
        min_chunks: a cache shrunk to this many chunks still runs without compiling; default: num_chunks.
        tile_tokens: prompts are computed in tiles of this many tokens; in invariant mode aligned to absolute positions.
        max_prefill_tiles: tiles in one step; with tile_tokens it bounds the prefill of a step whatever its limits say.
        row_buckets, tile_buckets, context_buckets: padded sizes in ascending order; the default is derived from the limits above.
        max_step_draws: the most tokens a sequence can generate in one step, whatever StepLimits allow.
        max_top_logprobs: the most log-probabilities per token a request may ask for.
        prefix_reuse: whether requests share pages of equal beginnings.
        stale_cache: what becomes of cached state when weights change.
        invariant: a request's tokens and log-probabilities are bit for bit the same whatever shares its steps; slower.
    """

    max_slots: int
    max_context_tokens: int
    page_tokens: int = 16
    num_chunks: int = 1
    pages_per_chunk: int | None = None
    min_chunks: int | None = None
    tile_tokens: int = 16
    max_prefill_tiles: int = 32
    row_buckets: tuple[int, ...] | None = None
    tile_buckets: tuple[int, ...] | None = None
    context_buckets: tuple[int, ...] | None = None
    max_step_draws: int = 8
    max_top_logprobs: int = 8
    prefix_reuse: bool = True
    stale_cache: StaleCache = StaleCache.KEEP
    invariant: bool = False

    def __post_init__(self) -> None:
        sizes = (self.max_slots, self.page_tokens, self.num_chunks, self.max_prefill_tiles, self.max_step_draws)
        if min(sizes) < 1 or self.max_context_tokens < 2:
            raise ValueError(f"{self}: sizes must be at least 1, max_context_tokens at least 2")
        if self.tile_tokens < 1 or self.page_tokens % self.tile_tokens:
            raise ValueError(f"tile_tokens={self.tile_tokens} must divide page_tokens={self.page_tokens}")
        if not 1 <= self.fewest_chunks <= self.num_chunks:
            raise ValueError(f"min_chunks={self.min_chunks} must lie in [1, num_chunks={self.num_chunks}]")
        if self.chunk_pages < self.pages_per_context:
            raise ValueError(
                f"pages_per_chunk={self.chunk_pages} cannot hold one request of max_context_tokens={self.max_context_tokens} "
                f"({self.pages_per_context} pages); raise the first or lower the second"
            )
        for name, buckets, needed in (
            ("row_buckets", self.rows, self.max_slots),
            ("tile_buckets", self.tiles, self.max_prefill_tiles),
            ("context_buckets", self.contexts, self.pages_per_context * self.page_tokens),
        ):
            if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] < needed:
                raise ValueError(f"{name}={buckets} must ascend from at least 1 to at least {needed}")
        if any(size % self.page_tokens for size in self.contexts) or self.contexts[-1] > self.pages_per_context * self.page_tokens:
            raise ValueError(
                f"context_buckets={self.contexts} must be multiples of page_tokens={self.page_tokens}, the last just enough "
                f"for max_context_tokens={self.max_context_tokens}"
            )

    @property
    def pages_per_context(self) -> int:
        return -(-self.max_context_tokens // self.page_tokens)

    @property
    def chunk_pages(self) -> int:
        """Pages of one chunk."""
        if self.pages_per_chunk is not None:
            return self.pages_per_chunk
        return -(-self.max_slots // self.num_chunks) * self.pages_per_context

    @property
    def fewest_chunks(self) -> int:
        return self.num_chunks if self.min_chunks is None else self.min_chunks

    @property
    def rows(self) -> tuple[int, ...]:
        return self.row_buckets or _descend(self.max_slots)

    @property
    def tiles(self) -> tuple[int, ...]:
        return self.tile_buckets or _descend(self.max_prefill_tiles)

    @property
    def contexts(self) -> tuple[int, ...]:
        longest = self.pages_per_context * self.page_tokens
        if self.context_buckets is not None:
            return self.context_buckets
        sizes = set(itertools.takewhile(lambda size: size < longest, _powers(SMALLEST_CONTEXT_BUCKET, BUCKET_RATIO)))
        return tuple(sorted({-(-size // self.page_tokens) * self.page_tokens for size in sizes} | {longest}))

    def first_tile(self, start: int) -> int:
        """The position at which the first tile of a piece of context begins: one that is not aligned wastes nothing before it."""
        return start // self.tile_tokens * self.tile_tokens if self.invariant else start

    def num_tiles(self, start: int, end: int) -> int:
        """Tiles that context[start:end] takes."""
        return -(-(end - self.first_tile(start)) // self.tile_tokens)

    @property
    def max_units(self) -> int:
        """Tiles of one chunk in one step of invariant mode, where a decoding sequence takes a tile too."""
        return self.max_slots + self.max_prefill_tiles


def bucket(value: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `value`."""
    for size in buckets:
        if size >= value:
            return size
    raise AssertionError(f"{value} exceeds the largest bucket of {buckets}")


def _powers(first: int, ratio: int) -> itertools.accumulate:
    return itertools.accumulate(itertools.repeat(ratio), lambda size, factor: size * factor, initial=first)


def _descend(largest: int) -> tuple[int, ...]:
    sizes = [largest]
    while sizes[-1] > max(1, largest // SMALLEST_SHARE):
        sizes.append(max(1, sizes[-1] // BUCKET_RATIO))
    return tuple(reversed(sizes))
