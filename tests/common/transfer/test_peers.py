"""The tree policy, event by event: shallow, without cycles, only the living and the well reported have children."""

import random

import pytest

from common.clock import FakeClock
from common.transfer.errors import MalformedUpdateError
from common.transfer.peers import EXCUSE_S, EXPIRY_S, NO_CHILDREN_S, Left, NewParent, PeerRegistry, PeerTree, Reason, Reported, Seen


def tree_of(num_members: int, fan_out: int = 2) -> PeerTree:
    tree = PeerTree(fan_out)
    for i in range(num_members):
        tree.on_event(Seen(f"p{i}"), 0.0)
    return tree


def depth(parents: dict[str, str | None], name: str) -> int:
    """Hops to the relay; fails on a cycle."""
    hops = 0
    at: str | None = name
    while at is not None:
        hops += 1
        assert hops <= len(parents)
        at = parents[at]
    return hops


def test_replicas_fill_the_tree_level_by_level() -> None:
    parents = tree_of(7).parents
    assert parents == {"p0": None, "p1": None, "p2": "p0", "p3": "p0", "p4": "p1", "p5": "p1", "p6": "p2"}


def test_decisions_name_those_whose_parent_changed_and_repeated_events_change_nothing() -> None:
    tree = PeerTree(2)
    assert tree.on_event(Seen("a"), 0.0) == [NewParent("a", None)]
    assert tree.on_event(Seen("a"), 1.0) == []
    assert tree.on_event(Left("nobody"), 1.0) == []
    assert tree.on_event(Reported("a", "nobody", Reason.BAD), 1.0) == []
    assert tree.on_event(Reported("a", "a", Reason.BAD), 1.0) == []
    assert tree.on_event(Seen("b"), 1.0) == [NewParent("b", None)]
    assert tree.on_event(Seen("c"), 1.0) == [NewParent("c", "a")]
    assert tree.on_event(Left("a"), 2.0) == [NewParent("c", None)]
    assert tree.on_event(Left("a"), 3.0) == []


def test_case_17_nobody_reads_from_a_replica_that_is_gone() -> None:
    tree = tree_of(14)
    for name in list(tree.parents):
        if name not in ("p0", "p4"):
            tree.on_event(Seen(name), EXPIRY_S)
    moved = tree.on_event(Seen("p1"), EXPIRY_S + 0.1)
    assert {"p2", "p3", "p10", "p11"} <= {decision.child for decision in moved}
    assert {"p0", "p4"}.isdisjoint(tree.parents)
    assert {"p0", "p4"}.isdisjoint(tree.parents.values())
    assert max(depth(tree.parents, name) for name in tree.parents) == 3


@pytest.mark.parametrize("reason", list(Reason))
def test_a_reported_replica_loses_its_children_for_a_time_and_keeps_its_own_parent(reason: Reason) -> None:
    tree = tree_of(6)
    tree.on_event(Reported("p2", "p0", reason), 1.0)
    assert "p0" not in tree.parents.values()
    assert tree.parents["p0"] is None
    assert all(depth(tree.parents, name) <= 3 for name in tree.parents)
    for seconds in range(0, int(NO_CHILDREN_S[reason]), 2):
        for name in list(tree.parents):
            tree.on_event(Seen(name), 1.0 + seconds)
            assert "p0" not in tree.parents.values()
    for name in list(tree.parents):
        tree.on_event(Seen(name), 2.0 + NO_CHILDREN_S[reason])
    assert "p0" in tree.parents.values()


@pytest.mark.parametrize("accused_first", [False, True])
def test_a_replica_that_only_passed_bad_bytes_on_is_excused(accused_first: bool) -> None:
    tree = tree_of(7)
    assert (tree.parents["p6"], tree.parents["p2"]) == ("p2", "p0")
    reports = [Reported("p6", "p2", Reason.BAD), Reported("p2", "p0", Reason.BAD)]
    for report in reports if accused_first else reports[::-1]:
        tree.on_event(report, 1.0)
    tree.on_event(Seen("p7"), 2.0)
    tree.on_event(Seen("p8"), 2.0)
    assert "p0" not in tree.parents.values()
    assert "p2" in tree.parents.values()
    tree.on_event(Reported("p6", "p2", Reason.BAD), 2.0 + EXCUSE_S)
    assert "p2" not in tree.parents.values()


def test_when_nobody_may_have_children_all_read_from_the_relay() -> None:
    tree = tree_of(6)
    for name in list(tree.parents):
        tree.on_event(Reported("p5" if name != "p5" else "p4", name, Reason.SLOW), 1.0)
    assert set(tree.parents.values()) == {None}
    for name in list(tree.parents):
        tree.on_event(Seen(name), 61.5)
    assert sum(parent is None for parent in tree.parents.values()) == 2


@pytest.mark.parametrize("fan_out", [1, 2, 3, 5])
def test_the_tree_keeps_its_shape_whatever_happens(fan_out: int) -> None:
    rng = random.Random(fan_out)
    tree, twin, now_s = PeerTree(fan_out), PeerTree(fan_out), 0.0
    childless: dict[str, float] = {}
    for _ in range(1500):
        now_s += rng.choice([0.0, 0.1, 1.0, 3.0])
        name, other = f"p{rng.randrange(20)}", f"p{rng.randrange(20)}"
        event = rng.choice([Seen(name), Seen(name), Seen(name), Seen(other), Left(name), Reported(name, other, Reason.SLOW)])
        if rng.random() > 0.1 and not isinstance(event, Seen):
            event = Seen(name)
        if isinstance(event, Left):
            childless.pop(name, None)
        before = tree.parents
        decisions = tree.on_event(event, now_s)
        if isinstance(event, Reported) and name != other and {name, other} <= set(before):
            childless[other] = max(childless.get(other, 0.0), now_s + NO_CHILDREN_S[Reason.SLOW])
        parents = tree.parents
        childless = {peer: until_s for peer, until_s in childless.items() if peer in parents}
        assert decisions == twin.on_event(event, now_s)
        after = {peer: parent for peer, parent in before.items() if peer in parents}
        after.update({decision.child: decision.parent for decision in decisions})
        assert after == parents
        banned = {peer for peer, until_s in childless.items() if now_s < until_s}
        assert banned.isdisjoint(parents.values())
        assert set(parents.values()) <= {None, *parents}
        depths = {peer: depth(parents, peer) for peer in parents}
        children = {peer: sum(parent == peer for parent in parents.values()) for peer in (None, *parents)}
        assert all(count <= fan_out for peer, count in children.items() if peer is not None)
        free = [depths.get(str(peer), 0) for peer, count in children.items() if count < fan_out and peer not in banned]
        if free:
            assert max(depths.values(), default=0) <= min(free) + 1


def test_a_fan_out_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="fan_out=0"):
        PeerTree(0)


def hello(name: str, reports: list[list[str]] | None = None, *, leaving: bool = False, url: str | None = None) -> dict[str, object]:
    return {"name": name, "url": url or f"http://{name}:1", "leaving": leaving, "reports": reports or []}


def test_the_registry_names_the_parent_and_forgets_who_is_silent() -> None:
    clock = FakeClock()
    registry = PeerRegistry(1, clock)
    assert registry.on_peer(hello("a")) == {"parent": None}
    assert registry.on_peer(hello("b")) == {"parent": {"name": "a", "url": "http://a:1"}}
    assert registry.on_peer(hello("a", url="http://a:2")) == {"parent": None}
    assert registry.on_peer(hello("b")) == {"parent": {"name": "a", "url": "http://a:2"}}
    clock.advance(EXPIRY_S + 1)
    assert registry.on_peer(hello("b")) == {"parent": None}
    assert registry.on_peer(hello("a")) == {"parent": {"name": "b", "url": "http://b:1"}}
    assert registry.on_peer(hello("b", leaving=True)) == {"parent": None}
    assert registry.on_peer(hello("a")) == {"parent": None}


@pytest.mark.parametrize(
    "change",
    [{"name": "../x"}, {"url": "file:///etc"}, {"url": "http://" + "x" * 400}, {"reports": [["a"]]}, {"reports": {"a": "bad"}}],
)
def test_the_registry_refuses_what_no_peer_says(change: dict[str, object]) -> None:
    with pytest.raises(MalformedUpdateError):
        PeerRegistry(2).on_peer(hello("a") | change)


def test_a_clock_that_jumps_throws_nobody_out_who_is_still_heard() -> None:
    tree = tree_of(5)
    for now_s in (5.0, 1.0, -100.0, 6.0):
        for i in range(5):
            tree.on_event(Seen(f"p{i}"), now_s)
        assert len(tree.parents) == 5
    tree.on_event(Seen("p0"), 1e6)
    assert tree.parents == {"p0": None}
