"""What the planner promises about steps, on a cache that is only counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_gpu.vllm.planner import Held, Prefix, Sequence, Step, _Planner, plan_step
from tests.conformance.driver import make_request, prompt

BLOCK_TOKENS = 4


class CountedCache:
    """Blocks by request, no prefixes shared; carries out steps as the scheduler would."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.blocks: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}

    def num_free_blocks(self) -> int:
        return self._num_blocks - sum(len(blocks) for blocks in self.blocks.values())

    def held(self, sequence: Sequence) -> Held | None:
        blocks = self.blocks.get(sequence.internal_id)
        return None if blocks is None else Held(self.computed[sequence.internal_id], len(blocks), frozenset(blocks))

    def prefix(self, sequence: Sequence) -> Prefix:
        return Prefix(0, (), frozenset())

    def carry_out(self, step: Step, live: list[Sequence]) -> None:
        """Apply a step; every planned token must find its block."""
        for sequence in (*step.displaced, *step.evicted):
            sequence.slot_idx, sequence.preempted = None, True
        for sequence in step.evicted:
            del self.blocks[sequence.internal_id], self.computed[sequence.internal_id]
        for entry in step.entries:
            sequence = entry.sequence
            assert self.computed.get(sequence.internal_id, 0) == entry.start
            sequence.slot_idx = entry.slot_idx
            used = {block for blocks in self.blocks.values() for block in blocks}
            free = [block for block in range(self._num_blocks) if block not in used]
            mine = self.blocks.setdefault(sequence.internal_id, [])
            needed = -(-(entry.start + entry.num_tokens) // BLOCK_TOKENS) - len(mine)
            assert needed <= len(free), f"{entry} needs {needed} blocks, {len(free)} are free"
            mine += free[: max(0, needed)]
            self.computed[sequence.internal_id] = entry.start + entry.num_tokens
            if self.computed[sequence.internal_id] == sequence.num_tokens:
                sequence.token_ids.append(1)
                if len(sequence.token_ids) == sequence.request.sampling.max_tokens:
                    live.remove(sequence)
                    del self.blocks[sequence.internal_id], self.computed[sequence.internal_id]


def sequence(idx: int, *, length: int = 6, max_tokens: int = 4, priority: int = 0) -> Sequence:
    request = make_request(f"r{idx}", prompt(length, idx), max_tokens=max_tokens, priority=priority)
    return Sequence(request=request, internal_id=str(idx), arrival=idx)


def test_a_waiting_request_of_higher_priority_takes_slot_and_blocks_at_once() -> None:
    """All slots and all blocks are held by requests of low priority."""
    low = [sequence(idx, length=7, max_tokens=9) for idx in range(2)]
    live, cache = list(low), CountedCache(num_blocks=4)
    cache.carry_out(plan_step(live, cache, max_slots=2, max_tokens=64), live)
    assert cache.num_free_blocks() == 0
    high = sequence(9, length=8, priority=1)
    live.append(high)
    step = plan_step(live, cache, max_slots=2, max_tokens=64)
    assert step.entries[0].sequence is high
    assert step.entries[0].num_tokens == 8
    assert low[1] in step.evicted


def test_a_preempted_request_goes_before_its_equals() -> None:
    waiting = [sequence(idx) for idx in range(3)]
    waiting[2].preempted = True
    step = plan_step(waiting, CountedCache(num_blocks=8), max_slots=1, max_tokens=64)
    assert [entry.sequence for entry in step.entries] == [waiting[2]]


def test_a_displaced_request_keeps_its_cache_where_there_is_room() -> None:
    low = sequence(0)
    live, cache = [low], CountedCache(num_blocks=8)
    cache.carry_out(plan_step(live, cache, max_slots=1, max_tokens=64), live)
    live.append(sequence(1, priority=1))
    step = plan_step(live, cache, max_slots=1, max_tokens=64)
    assert step.displaced == (low,)
    assert step.evicted == ()


_REQUESTS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 2)), min_size=1, max_size=8)


@settings(max_examples=200)
@given(
    requests=_REQUESTS, num_blocks=st.integers(5, 12), max_slots=st.integers(1, 4), limits=st.lists(st.integers(1, 20), min_size=1)
)
def test_every_plan_can_be_carried_out_and_every_request_ends(
    requests: list[tuple[int, int, int]], num_blocks: int, max_slots: int, limits: list[int]
) -> None:
    """The cache holds at least one request of the longest kind (20 tokens: 5 blocks)."""
    live = [sequence(idx, length=n, max_tokens=m, priority=p) for idx, (n, m, p) in enumerate(requests)]
    cache = CountedCache(num_blocks)
    for num_steps in range(2_000):
        if not live:
            break
        max_tokens = limits[num_steps % len(limits)]
        step = plan_step(live, cache, max_slots=max_slots, max_tokens=max_tokens)
        assert step.entries, "nothing is planned although requests wait"
        assert sum(entry.num_tokens for entry in step.entries) <= max_tokens
        assert len({entry.slot_idx for entry in step.entries}) == len(step.entries)
        cache.carry_out(step, live)
        assert len({other.slot_idx for other in live if other.slot_idx is not None}) <= max_slots
    assert not live


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_planning_changes_nothing(max_tokens: int) -> None:
    live, cache = [sequence(idx) for idx in range(4)], CountedCache(num_blocks=6)
    cache.carry_out(plan_step(live, cache, max_slots=3, max_tokens=64), live)
    first, second = (plan_step(live, cache, max_slots=3, max_tokens=max_tokens) for _ in range(2))
    assert first == second


def test_a_long_waiting_line_is_not_searched_for_slots_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence] = []
    slot_for = _Planner._slot_for

    def count(planner: _Planner, wanted: Sequence) -> int | None:
        asked.append(wanted)
        return slot_for(planner, wanted)

    monkeypatch.setattr(_Planner, "_slot_for", count)
    live, cache = [sequence(idx) for idx in range(500)], CountedCache(num_blocks=1000)
    for _ in range(3):
        asked.clear()
        step = plan_step(live, cache, max_slots=4, max_tokens=64)
        assert len(step.entries) == 4
        assert len(asked) == 5, "the slots' owners, and the first that finds none"
        cache.carry_out(step, live)
