"""Which requests share the next step: a pure decision over the requests in line and the blocks of the cache.

vLLM's own scheduler serves running requests first and preempts only when memory runs out; ours serves by priority, so that a
waiting request of higher priority takes a slot and blocks at the next step, and says beforehand what the step will hold. Blocks are
counted exactly as vLLM will allocate them: a plan can always be carried out.

Invariant: the first in line always gets at least one token, as long as the cache can hold one request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Protocol

from common.types import Request


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
    """A request inside the engine, with what it has sampled. `slot_idx` None means that it waits, with or without a cache."""

    request: Request
    internal_id: str
    arrival: int
    slot_idx: int | None = None
    preempted: bool = False
    aborted: bool = False
    cached_prompt_tokens: int | None = None
    """None until it first runs."""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = dataclasses.field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.token_ids)


@dataclasses.dataclass(frozen=True)
class Held:
    """A request's own cache: `num_blocks` blocks hold `num_tokens` tokens; `only_its` are the blocks nobody else uses."""

    num_tokens: int
    num_blocks: int
    only_its: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What is cached of a request that has no cache of its own; `idle` of the blocks are nobody's at this moment."""

    num_tokens: int
    blocks: tuple[int, ...]
    idle: frozenset[int]


class CacheView(Protocol):
    """The cache as the planner sees it; reading changes nothing."""

    block_tokens: int

    def num_free_blocks(self) -> int:
        """Blocks that an allocation may take, those with idle prefixes included."""
        ...

    def held(self, sequence: Sequence) -> Held | None:
        """None for a request without a cache."""
        ...

    def prefix(self, sequence: Sequence) -> Prefix: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """`num_tokens` tokens of a request from position `start` on, in a slot."""

    sequence: Sequence
    slot_idx: int
    start: int
    num_tokens: int

    @property
    def decodes(self) -> bool:
        return bool(self.sequence.token_ids) and self.sequence.num_tokens - self.start == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Entries in line order; `displaced` lose their slots and keep their caches, `evicted` lose both."""

    entries: tuple[Entry, ...]
    displaced: tuple[Sequence, ...]
    evicted: tuple[Sequence, ...]


def in_line(sequences: Iterable[Sequence], cache: CacheView) -> list[Sequence]:
    """Whom a step serves first: by priority; among equals decoding ones, then running, then preempted, then by arrival."""

    def place(sequence: Sequence) -> tuple[int, bool, bool, bool, int]:
        waits = sequence.slot_idx is None
        held = None if waits else cache.held(sequence)
        decodes = held is not None and bool(sequence.token_ids) and sequence.num_tokens - held.num_tokens == 1
        return (-sequence.request.priority, not decodes, waits, not sequence.preempted, sequence.arrival)

    return sorted(sequences, key=place)


def plan_step(sequences: Iterable[Sequence], cache: CacheView, *, max_slots: int, max_tokens: int) -> Step:
    """See the module. Changes nothing."""
    return _Planner(in_line(sequences, cache), cache, max_slots, max_tokens).plan()


class _Planner:
    def __init__(self, line: list[Sequence], cache: CacheView, max_slots: int, max_tokens: int) -> None:
        self._line, self._cache, self._max_slots, self._budget = line, cache, max_slots, max_tokens
        self._free = cache.num_free_blocks()
        self._freed: set[int] = set()
        self._pinned: set[int] = set()
        self._taken: dict[int, Sequence] = {}
        self._in_step: set[Sequence] = set()
        self._holders = {sequence.slot_idx: sequence for sequence in line if sequence.slot_idx is not None}
        """Of slots, in line order."""
        self._is_full = False
        """No slot for one that waits, nor for any behind it in line, until one is evicted."""
        self._displaced: list[Sequence] = []
        self._evicted: dict[Sequence, None] = {}

    def plan(self) -> Step:
        entries: list[Entry] = []
        for place, sequence in enumerate(self._line):
            if self._budget == 0:
                break
            if sequence in self._evicted or (self._is_full and sequence.slot_idx is None):
                continue
            slot_idx = self._slot_for(sequence)
            entry = None if slot_idx is None else self._entry(sequence, slot_idx, place)
            if entry is None:
                continue
            entries.append(entry)
            self._budget -= entry.num_tokens
            self._taken[entry.slot_idx] = sequence
            self._in_step.add(sequence)
        for slot_idx, sequence in self._holders.items():
            if slot_idx in self._taken and sequence not in self._in_step:
                self._displaced.append(sequence)
        return Step(entries=tuple(entries), displaced=tuple(self._displaced), evicted=tuple(self._evicted))

    def _slot_for(self, sequence: Sequence) -> int | None:
        """Its own slot (unless this step has given it away), a free one, or that of the last in line with a lower priority."""
        if sequence.slot_idx is not None:
            return None if sequence.slot_idx in self._taken else sequence.slot_idx
        for slot_idx in range(self._max_slots):
            if slot_idx not in self._holders and slot_idx not in self._taken:
                return slot_idx
        for slot_idx, other in reversed(self._holders.items()):
            if other.request.priority >= sequence.request.priority:
                break
            if slot_idx not in self._taken:
                return slot_idx
        self._is_full = True
        return None

    def _entry(self, sequence: Sequence, slot_idx: int, place: int) -> Entry | None:
        """As many of its tokens as budget and cache have room for, or None if there is none for any."""
        held = self._cache.held(sequence)
        if held is not None:
            start, num_blocks, taken_idle = held.num_tokens, held.num_blocks, frozenset[int]()
        else:
            prefix = self._cache.prefix(sequence)
            start, num_blocks = prefix.num_tokens, len(prefix.blocks)
            taken_idle = (prefix.idle | (self._freed & frozenset(prefix.blocks))) - self._pinned
        num_tokens = min(sequence.num_tokens - start, self._budget)
        while self._needed(start + num_tokens, num_blocks) + len(taken_idle) > self._free:
            victim = self._victim(place)
            if victim is None:
                room = (num_blocks + self._free - len(taken_idle)) * self._cache.block_tokens
                num_tokens = min(num_tokens, room - start)
                break
            self._evict(victim)
            if held is None:  # what the victim gave up may be part of the prefix
                taken_idle |= (self._freed & frozenset(prefix.blocks)) - self._pinned
        if num_tokens <= 0:
            return None
        self._free -= self._needed(start + num_tokens, num_blocks) + len(taken_idle)
        self._pinned |= taken_idle
        self._freed -= taken_idle
        return Entry(sequence=sequence, slot_idx=slot_idx, start=start, num_tokens=num_tokens)

    def _needed(self, num_tokens: int, num_blocks: int) -> int:
        return max(0, -(-num_tokens // self._cache.block_tokens) - num_blocks)

    def _victim(self, place: int) -> Sequence | None:
        """The last in line, behind `place`, whose cache can be given up."""
        for other in reversed(self._line[place + 1 :]):
            if other not in self._evicted and other not in self._in_step and self._cache.held(other) is not None:
                return other
        return None

    def _evict(self, victim: Sequence) -> None:
        held = self._cache.held(victim)
        assert held is not None
        self._evicted[victim] = None
        if victim.slot_idx is not None:
            del self._holders[victim.slot_idx]
        self._is_full = False
        self._free += len(held.only_its)
        self._freed |= held.only_its
