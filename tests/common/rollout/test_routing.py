"""The routing policy is pure: what is asked for is what the shares of slots in use say."""

from __future__ import annotations

from common.rollout.routing import SlotUse, least_loaded


def use(num_in_flight: int, num_slots: int) -> SlotUse:
    return SlotUse(num_in_flight=num_in_flight, num_slots=num_slots)


def test_the_smallest_share_of_slots_in_use_wins_and_the_first_of_equals() -> None:
    assert least_loaded([use(3, 4), use(5, 8)]) == 1
    assert least_loaded([use(2, 4), use(4, 8), use(1, 2)]) == 0
    assert least_loaded([use(0, 64), use(0, 64)]) == 0


def test_no_turn_goes_where_no_slot_is_free() -> None:
    assert least_loaded([use(4, 4), use(7, 8)]) == 1
    assert least_loaded([use(4, 4), use(8, 8)]) is None
    assert least_loaded([]) is None


def test_replicas_of_different_size_fill_in_step() -> None:
    uses = [use(0, 4), use(0, 12)]
    for _ in range(8):
        idx = least_loaded(uses)
        assert idx is not None
        uses[idx] = use(uses[idx].num_in_flight + 1, uses[idx].num_slots)
    assert [each.num_in_flight for each in uses] == [2, 6]
