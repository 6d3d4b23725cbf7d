"""A step as a few integer arrays: all that a process needs to compute it besides weights and cache. Plain numpy, no decisions.

Everything travels in two int32 arrays (floats by their bits), so that a step costs two transfers, and another process runs the same
step from `to_dict`. A row samples a token: it is the newest token of a decoding sequence, or only points at the end of a prompt. A
tile is `tile_tokens` positions of a prompt. Rows and tiles are grouped by the cache chunk their pages lie in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq

import numpy as np
from jaxtyping import Int32

from common.types import Request
from rose_jax.jetstream.config import JetStreamConfig, bucket
from rose_jax.jetstream.sequence import MAX_DEVICE_STOPS, Piece, Sequence
from rose_jax.sampling import KEY_WORDS, key_words

TOKEN, POSITION, SAMPLE_AT, DRAW, NUM_DRAWS, KEY = range(6)
"""Columns of a row. POSITION -1: computes nothing here. SAMPLE_AT: index of the hidden state whose successor is drawn, in the order
rows then tiles (in invariant mode: offset in its own tile). DRAW: tokens sampled before. NUM_DRAWS: tokens to sample at most."""
TEMPERATURE = KEY + KEY_WORDS
TOP_P, MIN_P, TOP_K, NUM_TOP, STOPS = range(TEMPERATURE + 1, TEMPERATURE + 6)
ROW_PAGES = STOPS + MAX_DEVICE_STOPS
"""STOPS: stop tokens, -1 where there are fewer. The page list comes last."""
NO_TOKEN = -1
BASE, FIRST, LAST, TILE_TOKENS = range(4)
"""Columns of a tile. It computes offsets FIRST <= offset < LAST from position BASE on; the page list follows its tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """See the module. Chunks C, rows R and tiles N of one chunk, padded to buckets.

    Args:
        with_options: some row uses top-p, top-k or min-p, or asks for top log-probabilities.
        num_units: invariant mode only: tiles in use per chunk; row i then belongs to tile i.
    """

    rows: Int32[np.ndarray, "C R W"]
    tiles: Int32[np.ndarray, "C N X"]
    with_options: bool
    num_units: Int32[np.ndarray, "C"] | None = None

    def to_dict(self) -> dict:
        """Plain lists, fit for JSON."""
        return {
            "rows": self.rows.tolist(),
            "tiles": {"shape": list(self.tiles.shape), "values": self.tiles.ravel().tolist()},
            "with_options": self.with_options,
            "num_units": None if self.num_units is None else self.num_units.tolist(),
        }

    @classmethod
    def from_dict(cls, fields: dict) -> StepInputs:
        return cls(
            rows=np.array(fields["rows"], np.int32),
            tiles=np.array(fields["tiles"]["values"], np.int32).reshape(fields["tiles"]["shape"]),
            with_options=fields["with_options"],
            num_units=None if fields["num_units"] is None else np.array(fields["num_units"], np.int32),
        )


class SlotTable:
    """What does not change from step to step, one row per slot, so that a step copies rows and fills in three columns."""

    def __init__(self, config: JetStreamConfig, *, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows = np.zeros((config.max_slots, ROW_PAGES + config.pages_per_context), np.int32)
        self._filled: list[list[int] | None] = [None] * config.max_slots  # the page list each row was filled from
        self._num_pages = [0] * config.max_slots

    def refresh(self, sequence: Sequence) -> None:
        """Bring the sequence's row up to date; cheap when it gained no page since."""
        slot_idx, pages = sequence.slot_idx, sequence.pages
        assert slot_idx is not None
        if self._filled[slot_idx] is not pages:  # a sequence that moves in, here or again, has a new list
            self._filled[slot_idx] = pages
            self._num_pages[slot_idx] = 0
            self.rows[slot_idx] = 0
            self.rows[slot_idx, KEY:ROW_PAGES] = sampling_columns(sequence.request, self._vocab_size)
            # Padding is read too, though masked: from an own page, since one of another sequence may hold nan.
            self.rows[slot_idx, ROW_PAGES:] = pages[0]
        known = self._num_pages[slot_idx]
        if known != len(pages):
            self.rows[slot_idx, ROW_PAGES + known : ROW_PAGES + len(pages)] = pages[known:]
            self._num_pages[slot_idx] = len(pages)


def sampling_columns(request: Request, vocab_size: int) -> Int32[np.ndarray, "columns"]:
    """Columns KEY to STOPS of a request's row: what stays the same from draw to draw."""
    params = request.sampling
    columns = np.zeros(ROW_PAGES - KEY, np.int32)
    columns[: TEMPERATURE - KEY] = key_words(request.key).view(np.int32)
    floats = np.array([params.temperature, params.top_p, params.min_p], np.float32)
    columns[TEMPERATURE - KEY : TOP_K - KEY] = floats.view(np.int32)
    columns[TOP_K - KEY] = vocab_size if params.top_k is None else min(params.top_k, vocab_size)
    columns[NUM_TOP - KEY] = params.num_top_logprobs
    stops = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]  # no other is ever drawn
    stops = stops if len(stops) <= MAX_DEVICE_STOPS else []
    columns[STOPS - KEY :] = NO_TOKEN
    columns[STOPS - KEY : STOPS - KEY + len(stops)] = stops
    return columns


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedStep:
    """A step's inputs (None: nothing to compute), and which output row belongs to which sequence, with how many draws at most."""

    inputs: StepInputs | None
    sampling: list[Sequence]
    output_rows: list[int]


NO_STEP = PackedStep(inputs=None, sampling=[], output_rows=[])


def pack(config: JetStreamConfig, table: SlotTable, pieces: Seq[Piece], num_chunks: int) -> PackedStep:
    """Lay the pieces out in the smallest buckets that hold them."""
    rows: list[list[Piece]] = [[] for _ in range(num_chunks)]
    prefills: list[list[Piece]] = [[] for _ in range(num_chunks)]
    context_tokens = 0
    for piece in pieces:
        sequence, start, end, _, max_draws = piece
        pool = sequence.pool
        assert pool is not None
        table.refresh(sequence)
        context_tokens = max(context_tokens, end + max(max_draws - 1, 0))
        if end - start > 1:
            prefills[pool.chunk_idx].append(piece)
        if end - start == 1 or max_draws:
            rows[pool.chunk_idx].append(piece)
    num_pages = bucket(context_tokens, config.contexts) // config.page_tokens
    num_rows = bucket(max(map(len, rows)), config.rows)
    tile_counts = [sum(config.num_tiles(piece.start, piece.end) for piece in chunk) for chunk in prefills]
    tiles_per_chunk = bucket(max(tile_counts), config.tiles) if any(tile_counts) else 0
    tile_array = np.zeros((num_chunks, tiles_per_chunk, TILE_TOKENS + config.tile_tokens + num_pages), np.int32)
    row_array = np.zeros((num_chunks, num_rows, ROW_PAGES + num_pages), np.int32)
    row_array[:, :, POSITION] = -1
    sampling: list[Sequence] = []
    output_rows: list[int] = []
    for chunk_idx in range(num_chunks):
        first_hidden = num_chunks * num_rows + chunk_idx * tiles_per_chunk * config.tile_tokens
        ends = _fill_tiles(config, table, tile_array[chunk_idx], prefills[chunk_idx], first_hidden)
        first_row = chunk_idx * num_rows
        _fill_rows(table, row_array[chunk_idx], rows[chunk_idx], ends, first_row)
        for row_idx, piece in enumerate(rows[chunk_idx], start=first_row):
            if piece.max_draws:
                sampling.append(piece.sequence)
                output_rows.append(row_idx)
    with_options = any([sequence.has_options for sequence in sampling])
    inputs = StepInputs(rows=row_array, tiles=tile_array, with_options=with_options)
    return PackedStep(inputs=inputs, sampling=sampling, output_rows=output_rows)


def _fill_tiles(
    config: JetStreamConfig, table: SlotTable, tiles: Int32[np.ndarray, "N X"], pieces: list[Piece], first_hidden: int
) -> dict[int, int]:
    """Write the tiles of one chunk; returns where the last hidden state of each slot's piece lies."""
    size, ends, tile_idx = config.tile_tokens, {}, 0
    first_page = TILE_TOKENS + size
    num_pages = tiles.shape[1] - first_page
    for piece in pieces:
        slot_idx, first_idx, start = piece.sequence.slot_idx, tile_idx, config.first_tile(piece.start)
        assert slot_idx is not None
        for base in range(start, piece.end, size):
            first, last = max(piece.start - base, 0), min(piece.end - base, size)
            tiles[tile_idx, BASE:TILE_TOKENS] = (base, first, last)
            tiles[tile_idx, TILE_TOKENS + first : TILE_TOKENS + last] = piece.sequence.context[base + first : base + last]
            tile_idx += 1
        tiles[first_idx:tile_idx, first_page:] = table.rows[slot_idx, ROW_PAGES : ROW_PAGES + num_pages]
        ends[slot_idx] = first_hidden + first_idx * size + piece.end - 1 - start
    return ends


def _fill_rows(table: SlotTable, rows: Int32[np.ndarray, "R W"], pieces: list[Piece], ends: dict[int, int], first_row: int) -> None:
    """Write the rows of one chunk; a piece in `ends` was computed as tiles and only samples here."""
    if not pieces:
        return
    slots = [piece.sequence.slot_idx or 0 for piece in pieces]
    filled = rows[: len(pieces)]
    filled[:] = table.rows[np.array(slots), : rows.shape[1]]
    dynamic = [
        (
            piece.sequence.context[piece.start],
            -1 if slot in ends else piece.start,
            ends.get(slot, row_idx),
            len(piece.sequence.token_ids),
            piece.max_draws or 1,
        )
        for row_idx, (slot, piece) in enumerate(zip(slots, pieces, strict=True), start=first_row)
    ]
    filled[:, TOKEN:KEY] = dynamic


def pack_units(config: JetStreamConfig, table: SlotTable, pieces: Seq[Piece], num_chunks: int) -> PackedStep:
    """Lay the pieces out for invariant mode: fixed shapes, tile i with row i, in the order of the plan."""
    first_page, num_units = TILE_TOKENS + config.tile_tokens, config.max_units
    tiles = np.zeros((num_chunks, num_units, first_page + config.pages_per_context), np.int32)
    rows = np.zeros((num_chunks, num_units, ROW_PAGES), np.int32)
    counts = np.zeros(num_chunks, np.int32)
    sampling: list[Sequence] = []
    output_rows: list[int] = []
    for piece in pieces:
        table.refresh(piece.sequence)
        pool, slot_idx = piece.sequence.pool, piece.sequence.slot_idx
        assert pool is not None
        assert slot_idx is not None
        chunk_idx, unit = pool.chunk_idx, int(counts[pool.chunk_idx])
        counts[chunk_idx] += config.num_tiles(piece.start, piece.end)
        _fill_tiles(config, table, tiles[chunk_idx, unit:], [piece], 0)
        if piece.max_draws:
            unit = int(counts[chunk_idx]) - 1
            rows[chunk_idx, unit] = table.rows[slot_idx, :ROW_PAGES]
            rows[chunk_idx, unit, SAMPLE_AT] = (piece.end - 1) % config.tile_tokens
            rows[chunk_idx, unit, DRAW] = len(piece.sequence.token_ids)
            sampling.append(piece.sequence)
            output_rows.append(chunk_idx * num_units + unit)
    inputs = StepInputs(rows=rows, tiles=tiles, with_options=True, num_units=counts)
    return PackedStep(inputs=inputs, sampling=sampling, output_rows=output_rows)
