"""The ledger of a device's memory: the sum is never exceeded, serving comes first, rollouts get back what they lost."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.serving.coserving.events import Side
from common.serving.coserving.memory import (
    Fixed,
    Gone,
    Held,
    KvLedger,
    LearnerStepped,
    MemorySettings,
    MemoryState,
    Needed,
    Reclaimable,
    Resize,
    first_to_go,
)

BUDGET, FIXED = 2000, {Side.SERVING: 600, Side.ROLLOUT: 400}
POOL = BUDGET - sum(FIXED.values())
HEADROOM = 200


def ledger(**changes: float) -> KvLedger:
    return KvLedger(BUDGET, dict(FIXED), MemorySettings(**changes))


def filled(of: KvLedger) -> KvLedger:
    """Rollouts hold all they may."""
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=of.limit_bytes(Side.ROLLOUT)), 0.0)
    return of


def test_in_calm_rollouts_have_all_but_the_headroom() -> None:
    of = ledger()
    assert (of.limit_bytes(Side.ROLLOUT), of.limit_bytes(Side.SERVING)) == (POOL - HEADROOM, HEADROOM)
    assert of.on_event(Needed(num_bytes=160), 0.0) == ()  # the high watermark itself


def test_pressure_halves_what_rollouts_may_hold_once_and_serving_waits_only_for_what_they_give_back() -> None:
    of = filled(ledger())
    cut = of.on_event(Needed(num_bytes=250), 1.0)
    assert cut == (Resize(side=Side.ROLLOUT, limit_bytes=400, why="pressure: an emergency cut"),)
    assert (of.state, of.num_cuts, of.missing_bytes) == (MemoryState.FROZEN, 1, 50)
    grown = of.on_event(Held(side=Side.ROLLOUT, num_bytes=600), 1.1)  # a slow hand-over: part of it so far
    assert grown == (Resize(side=Side.SERVING, limit_bytes=400, why="memory came back"),)
    assert of.missing_bytes == 0
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=400), 1.2)
    assert of.limit_bytes(Side.SERVING) == 600
    assert of.on_event(Needed(num_bytes=400), 1.3) == (), "frozen: no second halving"


def test_a_need_beyond_the_cut_takes_what_is_missing_down_to_nothing() -> None:
    of = filled(ledger())
    of.on_event(Needed(num_bytes=900), 1.0)
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=0), 1.1)
    assert (of.limit_bytes(Side.ROLLOUT), of.limit_bytes(Side.SERVING)) == (0, POOL)
    assert of.missing_bytes == 0


def test_rollouts_regrow_at_a_learner_step_or_after_a_quiet_period_and_not_before() -> None:
    of = filled(ledger(quiet_s=10.0))
    of.on_event(Needed(num_bytes=300), 1.0)
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=400), 1.1)
    for now_s in (2.0, 5.0, 11.9):
        assert of.on_event(Needed(num_bytes=90), now_s) == ()
    assert of.on_event(Needed(num_bytes=150), 12.0) == (), "no longer quiet: the period begins anew"
    for now_s in (13.0, 22.9):
        assert of.on_event(Needed(num_bytes=90), now_s) == ()
    regrown = of.on_event(Needed(num_bytes=90), 23.0)
    assert [(change.side, change.limit_bytes) for change in regrown] == [(Side.SERVING, HEADROOM), (Side.ROLLOUT, POOL - HEADROOM)]
    assert of.state is MemoryState.CALM
    filled(of).on_event(Needed(num_bytes=300), 30.0)
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=400), 30.1)
    of.on_event(Needed(num_bytes=90), 30.2)
    of.on_event(LearnerStepped(), 30.3)
    assert of.limit_bytes(Side.ROLLOUT) == POOL - HEADROOM


def test_a_learner_step_under_pressure_leaves_serving_what_it_needs() -> None:
    of = filled(ledger())
    of.on_event(Needed(num_bytes=480), 1.0)
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=of.limit_bytes(Side.ROLLOUT)), 1.1)
    of.on_event(LearnerStepped(), 2.0)
    assert of.state is MemoryState.FROZEN
    assert of.limit_bytes(Side.SERVING) == 600  # 480 is its high watermark
    assert of.num_cuts == 1


def test_a_limit_grows_only_by_what_nobody_holds() -> None:
    of = filled(ledger())
    of.on_event(Needed(num_bytes=500), 1.0)
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=300), 1.1)
    of.on_event(Held(side=Side.SERVING, num_bytes=500), 1.2)
    of.on_event(Needed(num_bytes=10), 1.3)
    shrunk = of.on_event(LearnerStepped(), 2.0)
    assert [(change.side, change.limit_bytes) for change in shrunk] == [(Side.SERVING, HEADROOM), (Side.ROLLOUT, 500)]
    grown = of.on_event(Held(side=Side.SERVING, num_bytes=150), 2.1)
    assert [(change.side, change.limit_bytes) for change in grown] == [(Side.ROLLOUT, POOL - HEADROOM)]


def test_an_engine_that_dies_in_the_middle_of_a_hand_over_leaves_all_it_had() -> None:
    of = filled(ledger())
    of.on_event(Needed(num_bytes=700), 1.0)
    assert of.missing_bytes > 0
    of.on_event(Gone(side=Side.ROLLOUT), 1.1)
    assert of.missing_bytes == 0
    assert of.pool_bytes == BUDGET - FIXED[Side.SERVING]


def test_weights_that_leave_are_room_for_caches_and_come_back_only_into_room() -> None:
    of = ledger()
    of.on_event(Fixed(side=Side.ROLLOUT, num_bytes=0), 0.0)
    assert of.limit_bytes(Side.SERVING) + of.limit_bytes(Side.ROLLOUT) == BUDGET - FIXED[Side.SERVING]
    filled(of)
    with pytest.raises(ValueError, match=r"weights of rollout cannot take 400 bytes: there is room for 0; make room first"):
        of.on_event(Fixed(side=Side.ROLLOUT, num_bytes=400), 1.0)
    of.on_event(Held(side=Side.ROLLOUT, num_bytes=0), 1.1)
    assert of.room_for_fixed(Side.ROLLOUT) >= 400
    of.on_event(Fixed(side=Side.ROLLOUT, num_bytes=400), 1.2)
    assert of.pool_bytes == POOL


def test_a_cache_that_holds_more_than_it_may_is_named() -> None:
    of = ledger()
    with pytest.raises(ValueError, match="the serving cache holds 201 bytes, at most 200 were allowed"):
        of.on_event(Held(side=Side.SERVING, num_bytes=201), 0.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"headroom_share": 0.0}, "headroom_share=0.0"),
        ({"high_watermark": 0.4}, "low_watermark=0.5 < high_watermark=0.4"),
        ({"quiet_s": 0.0}, "quiet_s=0.0"),
    ],
)
def test_settings_that_make_no_sense_are_named(changes: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        MemorySettings(**changes)
    with pytest.raises(ValueError, match="leaves nothing for caches"):
        KvLedger(900, dict(FIXED))


@dataclasses.dataclass
class Engines:
    """Two caches that obey late: they report what they hold now and then, moving part of the way to what is asked of them."""

    of: KvLedger
    rng: random.Random
    serving_need: int = 0

    def step(self, now_s: float) -> None:
        match self.rng.randrange(8):
            case 0 | 1 | 2:
                self.serving_need = self.rng.choice([0, 50, 100, 170, 300, 600, POOL, 2 * POOL])
                self.of.on_event(Needed(num_bytes=self.serving_need), now_s)
            case 3 | 4:
                self._move(Side.ROLLOUT, self.of.limit_bytes(Side.ROLLOUT), now_s)
            case 5:
                self._move(Side.SERVING, min(self.serving_need, self.of.limit_bytes(Side.SERVING)), now_s)
            case 6:
                self.of.on_event(LearnerStepped(), now_s)
            case 7:
                wanted = self.rng.choice([0, FIXED[Side.ROLLOUT]])
                if wanted <= self.of.room_for_fixed(Side.ROLLOUT):
                    self.of.on_event(Fixed(side=Side.ROLLOUT, num_bytes=wanted), now_s)

    def _move(self, side: Side, to_bytes: int, now_s: float) -> None:
        held = self.of.held_bytes(side)
        self.of.on_event(Held(side=side, num_bytes=held + round((to_bytes - held) * self.rng.choice([0.3, 1.0]))), now_s)

    def check(self) -> None:
        taken = sum(max(self.of.held_bytes(side), self.of.limit_bytes(side)) for side in Side)
        assert taken <= self.of.pool_bytes
        assert sum(self.of.held_bytes(side) for side in Side) + sum(self.of._fixed.values()) <= BUDGET
        if self.of.missing_bytes:  # then rollouts have been asked for all of it, and hold what is missing
            asked = self.of.held_bytes(Side.ROLLOUT) - self.of.limit_bytes(Side.ROLLOUT)
            assert asked >= self.of.missing_bytes


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_whatever_comes_the_budget_holds_and_serving_misses_only_what_was_asked_back(seed: int) -> None:
    rng = random.Random(seed)
    engines = Engines(ledger(quiet_s=rng.choice([1.0, 20.0]), headroom_share=rng.choice([0.1, 0.2, 0.5])), rng)
    for number in range(150):
        engines.step(0.5 * number)
        engines.check()
    engines.of.on_event(Needed(num_bytes=engines.serving_need), 100.0)
    engines._move(Side.ROLLOUT, 0, 100.1)
    for side in Side:
        engines.of.on_event(Held(side=side, num_bytes=0), 100.2)
    assert engines.of.missing_bytes == 0, "nothing is lost: with empty caches serving may hold all it needs"


def test_prefixes_nobody_waits_for_go_first_then_rollouts_by_least_work_lost() -> None:
    candidates = [
        Reclaimable(name="long rollout", num_bytes=100, lost_tokens=900),
        Reclaimable(name="new prefix", num_bytes=50, used_s=9.0),
        Reclaimable(name="short rollout", num_bytes=100, lost_tokens=20),
        Reclaimable(name="old prefix", num_bytes=50, used_s=1.0),
    ]
    order = ["old prefix", "new prefix", "short rollout", "long rollout"]
    assert [candidate.name for candidate in first_to_go(candidates, 10**9)] == order
    assert [candidate.name for candidate in first_to_go(candidates, 60)] == order[:2]
    assert [candidate.name for candidate in first_to_go(candidates, 101)] == order[:3]
    assert first_to_go(candidates, 0) == []
