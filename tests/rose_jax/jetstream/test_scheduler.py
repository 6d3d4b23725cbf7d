"""The scheduler alone, under random arrivals, limits, preemptions and ends: no page lost, no limit passed, everybody finishes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from common.serving.engine import StaleCache
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.scheduler import Scheduler
from rose_jax.jetstream.sequence import Piece, Sequence
from tests.rose_jax.jetstream.serving_data import make_request

CONFIG = JetStreamConfig(
    max_slots=3,
    max_context_tokens=24,
    page_tokens=4,
    tile_tokens=2,
    max_prefill_tiles=4,
    num_chunks=2,
    min_chunks=1,
    pages_per_chunk=9,
)


def check_plan(scheduler: Scheduler, pieces: list[Piece], max_tokens: int) -> None:
    assert sum(piece.end - piece.start + max(piece.max_draws - 1, 0) for piece in pieces) <= max_tokens
    assert len({piece.sequence.slot_idx for piece in pieces}) == len(pieces)
    tiles = [0] * len(scheduler.pools)
    for piece in pieces:
        sequence = piece.sequence
        assert sequence in scheduler.running
        assert piece.start == sequence.num_computed
        assert piece.end <= len(sequence.context)
        assert len(sequence.pages) * CONFIG.page_tokens >= piece.end + max(piece.max_draws - 1, 0)
        assert sequence.pool is not None
        if not piece.decodes:
            tiles[sequence.pool.chunk_idx] += scheduler.config.num_tiles(piece.start, piece.end)
    assert max(tiles) <= CONFIG.max_prefill_tiles
    assert len(scheduler.running) <= CONFIG.max_slots
    assert scheduler.running == sorted(scheduler.running, key=lambda sequence: sequence.rank)
    held = Counter((id(item.pool), page) for item in [*scheduler.running, *scheduler.waiting] for page in item.pages)
    for pool in scheduler.pools:
        pool.check()
        assert pool._holders == [held.pop((id(pool), page), 0) for page in range(pool.num_pages)]
    assert not held


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(StaleCache))
def test_everybody_finishes_and_no_page_is_lost(seed: int, stale_cache: StaleCache) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(dataclasses.replace(CONFIG, stale_cache=stale_cache), version=0)
    upcoming = [
        Sequence.start(
            make_request(
                f"r{idx}",
                [rng.randrange(2) for _ in range(rng.randrange(1, 16))],
                priority=rng.randrange(2),
                max_tokens=rng.randrange(1, 8),
            ),
            arrival=idx,
        )
        for idx in range(rng.randrange(1, 9))
    ]
    live: list[Sequence] = []
    for _ in range(2_000):
        while upcoming and rng.random() < 0.4:
            live.append(upcoming.pop(0))
            scheduler.add(live[-1])
        if scheduler.running and rng.random() < 0.15:
            scheduler.undo()
            if scheduler.running:
                scheduler.preempt(rng.choice(scheduler.running), keep_cache=rng.random() < 0.5)
        if rng.random() < 0.05:
            if len(scheduler.pools) == 2:
                scheduler.remove_chunk()
            else:
                scheduler.add_chunk()
        if rng.random() < 0.05:
            scheduler.change_version(rng.randrange(3))
        max_tokens = rng.randrange(1, 20)
        pieces = scheduler.plan(max_tokens, rng.choice([1, 1, 3, 8]))
        check_plan(scheduler, pieces, max_tokens)
        if rng.random() < 0.2:
            continue  # the plan is not carried out
        if not pieces:
            assert not live
            if not upcoming:
                break
        scheduler.advance(pieces)
        for piece in pieces:
            if not piece.max_draws:
                continue
            sequence = piece.sequence
            for draw_idx in range(rng.randrange(piece.max_draws) + 1):  # it may stop early
                sequence.num_computed += draw_idx > 0
                sequence.token_ids.append(rng.randrange(2))
                sequence.context.append(sequence.token_ids[-1])
            if len(sequence.token_ids) == sequence.request.sampling.max_tokens:
                scheduler.remove(sequence)
                live.remove(sequence)
    assert not live
    assert not upcoming
    for pool in scheduler.pools:
        pool.check()
        assert pool.num_available == pool.num_pages


def test_among_equals_decodes_go_before_prefills_and_running_before_waiting() -> None:
    scheduler = Scheduler(CONFIG, version=0)
    first, second, third = (
        Sequence.start(make_request(name, [idx] * 6, max_tokens=3), arrival=idx) for idx, name in enumerate("abc")
    )
    scheduler.add(first)
    scheduler.advance(scheduler.plan(6))
    first.token_ids.append(1)
    first.context.append(1)
    scheduler.add(second)
    scheduler.add(third)
    assert [(piece.sequence, piece.end - piece.start) for piece in scheduler.plan(5)] == [(first, 1), (second, 4)]
    scheduler.advance(scheduler.plan(5))
    first.token_ids.append(1)
    first.context.append(1)
    assert [(piece.sequence, piece.end - piece.start) for piece in scheduler.plan(4)] == [(first, 1), (second, 2), (third, 1)]


def test_a_plan_that_is_not_carried_out_offers_no_page() -> None:
    scheduler = Scheduler(CONFIG, version=0)
    sequence = Sequence.start(make_request("a", [1] * 9, max_tokens=3), arrival=0)
    scheduler.add(sequence)
    scheduler.plan(100)
    scheduler.undo()
    other = Sequence.start(make_request("b", [1] * 9, max_tokens=3, priority=1), arrival=1)
    scheduler.add(other)
    (piece, *_) = scheduler.plan(4)
    assert (piece.sequence, piece.start) == (other, 0)
