"""Who computes what in the next step: slots, pages, token budget, priorities, prefix reuse. Pure host code, no arrays, no clock.

Order of service: higher priority first; among equals decoding sequences, then running ones that still prefill, then waiting ones
(preempted before new). A waiting sequence takes the slot, and if need be the pages, of a running one of strictly lower priority; a
running one that needs a page takes it from whoever is behind it in line. Refuses nothing: what can never run the engine refuses.
Pages are registered for reuse while planning: all sequences of a step see each other's keys, since every layer writes before it
reads. Invariant: planning again without `advance` gives the plan that would have been made the first time.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from common.serving.engine import StaleCache
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.pages import Node, PagePool, root_node
from rose_jax.jetstream.sequence import Piece, Sequence


@dataclasses.dataclass(kw_only=True, slots=True)
class _Registered:
    """A page registered by the plan at hand, and the sequence's state before that."""

    sequence: Sequence
    page: int | None
    node: Node
    num_registered: int


@dataclasses.dataclass(kw_only=True, slots=True)
class _Admitted:
    """A sequence that the plan at hand gave a slot, and what it had before."""

    sequence: Sequence
    had_cache: bool
    cached_prompt_tokens: int | None


class Scheduler:
    """See the module. `running` and `waiting` are in order of rank."""

    def __init__(self, config: JetStreamConfig, *, version: int) -> None:
        self.config = config
        self.version = version
        self.pools = [self._new_pool(chunk_idx) for chunk_idx in range(config.num_chunks)]
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._free_slots = list(range(config.max_slots - 1, -1, -1))
        self._num_commits = 0
        self._registered: list[_Registered] = []
        self._admitted: list[_Admitted] = []
        self._planned: set[int] = set()

    def _new_pool(self, chunk_idx: int) -> PagePool:
        return PagePool(num_pages=self.config.chunk_pages, page_tokens=self.config.page_tokens, chunk_idx=chunk_idx)

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget an ended sequence; its pages stay for reuse."""
        if sequence.slot_idx is None:
            self.waiting.remove(sequence)
        else:
            self._leave_slot(sequence)
        self._release(sequence)

    def preempt(self, sequence: Sequence, *, keep_cache: bool) -> None:
        """Back to the waiting line, before its equals. Without its cache: pages that nobody else holds are free and forgotten."""
        self._leave_slot(sequence)
        if not keep_cache:
            self._release(sequence, forget=True)
        sequence.preempted = True
        self.add(sequence)

    def plan(self, max_tokens: int, draws_per_sequence: int = 1) -> list[Piece]:
        """The pieces of the next step, in an order in which each may read what those before it write."""
        self.undo()
        budget, page_tokens = max_tokens, self.config.page_tokens
        tiles_left = [self.config.max_prefill_tiles] * len(self.pools)
        pieces: list[Piece] = []
        admitting = only_decodes = True
        for sequence in self._line():
            if budget == 0:
                break
            if sequence.slot_idx is None:
                admitting = admitting and self._admit(sequence)
                if not admitting:  # the first that finds no room waits for it, and those behind it with it
                    continue
            pool, start, length = sequence.pool, sequence.num_computed, len(sequence.context)
            assert pool is not None
            decodes = length - start == 1 and bool(sequence.token_ids)
            end = start + 1 if decodes else start + self._chunk_tokens(sequence, budget, tiles_left[pool.chunk_idx])
            if end == start or (end > len(sequence.pages) * page_tokens and not self._grow(sequence, end)):
                continue
            if not decodes:
                tiles_left[pool.chunk_idx] -= self.config.num_tiles(start, end)
                only_decodes = False
            budget -= end - start
            self._planned.add(id(sequence))
            if end // page_tokens > sequence.num_registered:
                self._register(sequence, end)
            pieces.append(Piece(sequence, start, end, decodes, 1 if end == length else 0))
        if min(draws_per_sequence, self.config.max_step_draws) > 1 and only_decodes and not self.config.invariant:
            return self._lengthen(pieces, budget, min(draws_per_sequence, self.config.max_step_draws))
        return pieces

    def _lengthen(self, pieces: list[Piece], budget: int, draws_per_sequence: int) -> list[Piece]:
        """Let decoding sequences draw several tokens, as far as budget, free pages and what they may still generate allow."""
        if not all(piece.sequence.runs_ahead for piece in pieces):
            return pieces
        lengthened = []
        for idx, piece in enumerate(pieces):
            sequence, pool = piece.sequence, piece.sequence.pool
            assert pool is not None
            share = budget // (len(pieces) - idx)
            more = min(draws_per_sequence - 1, share, sequence.request.sampling.max_tokens - len(sequence.token_ids) - 1)
            missing = self._pages_for(piece.end + more) - len(sequence.pages)
            if missing > 0:
                pages = pool.allocate(missing)
                if pages is None:
                    more = 0
                else:
                    sequence.pages += pages
            budget -= more
            lengthened.append(piece._replace(max_draws=1 + more))
        return lengthened

    def advance(self, pieces: Iterable[Piece]) -> None:
        """The plan is being carried out: what it writes counts as cached from now on."""
        for piece in pieces:
            piece.sequence.num_computed = piece.end
        self._registered.clear()
        self._admitted.clear()
        self._planned.clear()

    def undo(self) -> None:
        """Take back what the last plan assumed, if it was not carried out."""
        for entry in reversed(self._registered):
            if entry.page is not None and entry.sequence.pool is not None:
                entry.sequence.pool.forget(entry.page)
            entry.sequence.node, entry.sequence.num_registered = entry.node, entry.num_registered
        for admitted in reversed(self._admitted):
            sequence = admitted.sequence
            if sequence.slot_idx is None:
                continue
            self._leave_slot(sequence)
            if not admitted.had_cache:
                self._release(sequence)
            sequence.cached_prompt_tokens = admitted.cached_prompt_tokens
            self.add(sequence)
        self._registered.clear()
        self._admitted.clear()
        self._planned.clear()

    def change_version(self, version: int) -> None:
        """New weights: treat cached state as config.stale_cache says."""
        self.undo()
        self.version = version
        self._num_commits += 1
        if self.config.stale_cache is StaleCache.DROP:
            self.drop_caches()
        elif self.config.stale_cache is StaleCache.TAG:
            for sequence in [*self.running, *self.waiting]:
                if sequence.pages:
                    sequence.node = None

    def drop_caches(self) -> None:
        """Give up every page: running sequences start again from their tokens, nothing is left for reuse."""
        self.undo()
        for sequence in list(self.running):
            self.preempt(sequence, keep_cache=False)
        for sequence in self.waiting:
            self._release(sequence, forget=True)
        for pool in self.pools:
            pool.forget_all()

    def remove_chunk(self) -> None:
        """Give up the last chunk; whoever lives there is preempted without its cache."""
        self.undo()
        pool = self.pools.pop()
        for sequence in [sequence for sequence in self.running if sequence.pool is pool]:
            self.preempt(sequence, keep_cache=False)
        for sequence in self.waiting:
            if sequence.pool is pool:
                self._release(sequence)

    def add_chunk(self) -> None:
        self.undo()
        self.pools.append(self._new_pool(len(self.pools)))

    def _line(self) -> list[Sequence]:
        # Only as many waiting ones as there are slots can get in.
        if not self.waiting and all(map(_decodes_next, self.running)):
            return list(self.running)
        return sorted([*self.running, *self.waiting[: self.config.max_slots]], key=_service_order)

    def _chunk_tokens(self, sequence: Sequence, budget: int, tiles_left: int) -> int:
        end_of_tiles = self.config.first_tile(sequence.num_computed) + tiles_left * self.config.tile_tokens
        return max(0, min(sequence.num_remaining, budget, end_of_tiles - sequence.num_computed))

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence a slot and pages for its whole context; False when there is no room."""
        if not self._free_slots and (not self.running or self.running[-1].priority >= sequence.priority):
            return False
        admitted = _Admitted(
            sequence=sequence,
            had_cache=bool(sequence.pages),
            cached_prompt_tokens=sequence.cached_prompt_tokens,
        )
        if not sequence.pages and not self._place(sequence):
            return False
        if not self._free_slots:
            self.preempt(self.running[-1], keep_cache=True)
        self.waiting.remove(sequence)
        sequence.slot_idx = self._free_slots.pop()
        bisect.insort(self.running, sequence, key=_rank)
        self._admitted.append(admitted)
        return True

    def _place(self, sequence: Sequence) -> bool:
        """Choose a chunk, share the prefix it knows, allocate the other pages of the context."""
        needed = self._pages_for(len(sequence.context))
        # Not by the version's number: after a resume other weights may come under one that was here before.
        tag = self._num_commits if self.config.stale_cache is StaleCache.TAG else None
        max_shared = (len(sequence.context) - 1) // self.config.page_tokens if self.config.prefix_reuse else 0
        root = root_node(tag, sequence.request.cache_namespace)
        options = [(pool, *pool.match(root, sequence.context, max_pages=max_shared)) for pool in self.pools]
        options.sort(key=lambda option: (-len(option[1]), -option[0].num_available))
        for pool, shared, node in options:
            pool.hold(shared)
            pages = pool.allocate(needed - len(shared)) if self._make_room(pool, needed - len(shared), sequence) else None
            if pages is None:
                pool.release(shared)
                continue
            sequence.pool, sequence.pages = pool, shared + pages
            sequence.node, sequence.num_registered = node, len(shared)
            sequence.num_computed = len(shared) * self.config.page_tokens
            if sequence.cached_prompt_tokens is None:
                sequence.cached_prompt_tokens = sequence.num_computed
            return True
        return False

    def _grow(self, sequence: Sequence, end: int) -> bool:
        missing = self._pages_for(end) - len(sequence.pages)
        if missing <= 0:
            return True
        assert sequence.pool is not None
        pages = sequence.pool.allocate(missing) if self._make_room(sequence.pool, missing, sequence) else None
        if pages is None:
            return False
        sequence.pages += pages
        return True

    def _make_room(self, pool: PagePool, num_pages: int, sequence: Sequence) -> bool:
        """Take caches from those behind `sequence` in line, waiting ones first, until the pool can give `num_pages`."""
        if pool.num_available >= num_pages:
            return True
        for other in reversed(self.waiting):
            if other.pool is pool and other is not sequence and other.rank > sequence.rank:
                self._release(other)
                if pool.num_available >= num_pages:
                    return True
        runs = sequence.slot_idx is not None
        for other in list(reversed(self.running)):
            behind = other.rank > sequence.rank if runs else other.priority < sequence.priority
            if behind and other.pool is pool and id(other) not in self._planned:
                self.preempt(other, keep_cache=False)
                if pool.num_available >= num_pages:
                    return True
        return False

    def _register(self, sequence: Sequence, end: int) -> None:
        """Offer the pages that context[:end] fills for reuse."""
        if sequence.node is None or not self.config.prefix_reuse:
            return
        assert sequence.pool is not None
        size = self.config.page_tokens
        for page_idx in range(sequence.num_registered, end // size):
            page, parent = sequence.pages[page_idx], sequence.node
            tokens = tuple(sequence.context[page_idx * size : (page_idx + 1) * size])
            sequence.node, is_new = sequence.pool.register(parent, tokens, page)
            entry = _Registered(sequence=sequence, page=page if is_new else None, node=parent, num_registered=page_idx)
            self._registered.append(entry)
            sequence.num_registered = page_idx + 1

    def _leave_slot(self, sequence: Sequence) -> None:
        assert sequence.slot_idx is not None
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot_idx)
        sequence.slot_idx = None

    def _release(self, sequence: Sequence, *, forget: bool = False) -> None:
        if sequence.pool is not None:
            sequence.pool.release(sequence.pages, forget=forget)
        sequence.pool, sequence.pages, sequence.node = None, [], None
        sequence.num_computed = sequence.num_registered = 0

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_tokens)


def _rank(sequence: Sequence) -> tuple[int, bool, int]:
    return sequence.rank


def _decodes_next(sequence: Sequence) -> bool:
    return sequence.decodes_next


def _service_order(sequence: Sequence) -> tuple[int, bool, bool, bool, int]:
    waits = sequence.slot_idx is None
    return (-sequence.priority, waits or not sequence.decodes_next, waits, not sequence.preempted, sequence.arrival)
