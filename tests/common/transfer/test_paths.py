"""Chain or anchor, and what may be pruned: decisions as values."""

from common.transfer.manifest import UpdateHead, UpdateKey, UpdateKind
from common.transfer.paths import Held, newest_path, prunable
from common.transfer.store.protocol import RECEIVER_TTL_S, CatalogEntry, Confirmation, UpdateState


def entry(
    version: int, base: int | None, size: int, *, state: UpdateState = UpdateState.SEALED, lineage: str = "a"
) -> CatalogEntry:
    head = UpdateHead(version=version, base_version=base, lineage=lineage, layout_digest="d", num_buckets=1, dense_bytes=1000)
    return CatalogEntry(head=head, state=state, wire_bytes=size)


def steps(entries: list[CatalogEntry], held: int | None, **kwargs: int) -> list[tuple[int, int | None]] | None:
    path = newest_path(entries, None if held is None else Held("a", held), **kwargs)
    return None if path is None else [(e.head.version, e.head.base_version) for e in path.updates]


CHAIN = [entry(0, None, 700), entry(1, 0, 100), entry(2, 1, 200), entry(2, None, 700), entry(3, 2, 300), entry(4, 3, 300)]


def test_the_cheaper_of_chain_and_anchor_is_taken() -> None:
    assert steps(CHAIN, 3) == [(4, 3)]
    assert steps(CHAIN, 0) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert steps(CHAIN, None) == [(2, None), (3, 2), (4, 3)]
    long = [entry(0, None, 700), *(entry(v, v - 1, 200) for v in range(1, 6)), entry(5, None, 700)]
    assert steps(long, 0) == [(5, None)]
    assert steps(long, 2) == [(3, 2), (4, 3), (5, 4)]


def test_what_is_held_needs_nothing_and_what_cannot_be_reached_is_none() -> None:
    assert steps(CHAIN, 4) == []
    assert steps([entry(4, 3, 10)], 1) == []
    assert steps([entry(4, 3, 10)], None) is None
    assert steps([entry(4, 3, 10)], 1, version=4) is None
    assert steps([], 1) is None
    assert steps([entry(4, 3, 10, state=UpdateState.FAILED)], 3) is None


def test_a_failed_update_is_passed_over_and_another_life_starts_from_its_anchor() -> None:
    failed = [*CHAIN[:2], entry(2, 1, 50, state=UpdateState.FAILED)]
    assert steps(failed, 0) == [(1, 0)]
    assert newest_path([entry(2, None, 700, lineage="b")], Held("a", 2)) is not None
    path = newest_path([entry(2, None, 700, lineage="b")], Held("a", 2))
    assert path is not None
    assert [e.head.lineage for e in path.updates] == ["b"]


def test_an_anchor_that_is_still_written_is_not_taken_for_a_small_one() -> None:
    assert steps([*CHAIN, entry(4, None, 10, state=UpdateState.OPEN)], 2) == [(3, 2), (4, 3)]


def test_a_version_can_be_asked_for() -> None:
    assert steps(CHAIN, 0, version=1) == [(1, 0)]
    assert steps(CHAIN, None, version=1) == [(0, None), (1, 0)]
    assert steps(CHAIN, 4, version=1) == [(0, None), (1, 0)]


def test_receivers_seen_lately_keep_the_deltas_they_need() -> None:
    behind = {"r": Confirmation(0, 5.0)}
    silent = {"r": Confirmation(0, RECEIVER_TTL_S + 1)}
    anchor_0, delta_1, delta_2 = UpdateKey(0, UpdateKind.ANCHOR), UpdateKey(1, UpdateKind.DELTA), UpdateKey(2, UpdateKind.DELTA)
    assert prunable(CHAIN, behind) == [anchor_0]
    assert prunable(CHAIN, silent) == [anchor_0, delta_1, delta_2]
    assert prunable(CHAIN, {}) == [anchor_0, delta_1, delta_2]
    costly = [entry(0, None, 700), entry(1, 0, 500), entry(2, 1, 500), entry(2, None, 700)]
    assert prunable(costly, behind) == [anchor_0, delta_1, delta_2]


def test_the_newest_anchor_and_what_is_being_written_stay() -> None:
    assert prunable([entry(0, None, 700)], {}) == []
    assert prunable([*CHAIN, entry(5, None, 0, state=UpdateState.OPEN)], {"r": Confirmation(4, 1.0)}) == [
        UpdateKey(0, UpdateKind.ANCHOR),
        UpdateKey(1, UpdateKind.DELTA),
        UpdateKey(2, UpdateKind.DELTA),
    ]
    assert prunable([*CHAIN[:2], entry(2, 1, 5, state=UpdateState.FAILED)], {}) == [UpdateKey(2, UpdateKind.DELTA)]
