"""The page pool: sharing, forgetting, reuse, and the invariant under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_jax.jetstream.pages import Node, PagePool, root_node

PAGE = 2
ROOT = root_node(None, "")


def make_pool(num_pages: int = 4) -> PagePool:
    return PagePool(num_pages=num_pages, page_tokens=PAGE, chunk_idx=0)


def store(pool: PagePool, tokens: list[int], root: Node = ROOT) -> list[int]:
    """Allocate and register pages for `tokens`, as a request that computed them would."""
    pages = pool.allocate(len(tokens) // PAGE)
    assert pages is not None
    node = root
    for idx, page in enumerate(pages):
        node, _ = pool.register(node, tuple(tokens[idx * PAGE : (idx + 1) * PAGE]), page)
    return pages


def test_a_released_prefix_is_found_again_and_held_pages_are_never_given_away() -> None:
    pool = make_pool()
    pages = store(pool, [1, 2, 3, 4])
    pool.release(pages)
    found, _ = pool.match(ROOT, [1, 2, 3, 4, 5, 6], max_pages=3)
    assert found == pages
    pool.hold(found)
    assert pool.allocate(3) is None
    assert set(pool.allocate(2) or []).isdisjoint(pages)
    pool.check()


def test_a_prefix_matches_only_after_the_same_tokens() -> None:
    pool = make_pool()
    store(pool, [1, 2, 3, 4])
    assert pool.match(ROOT, [9, 9, 3, 4], max_pages=2)[0] == []
    assert len(pool.match(ROOT, [1, 2, 9, 9], max_pages=2)[0]) == 1


def test_versions_do_not_see_each_others_pages() -> None:
    pool = make_pool()
    pool.release(store(pool, [1, 2], root_node(3, "")))
    assert pool.match(root_node(4, ""), [1, 2], max_pages=1)[0] == []
    assert len(pool.match(root_node(3, ""), [1, 2], max_pages=1)[0]) == 1


def test_room_is_made_from_the_longest_idle_page_and_from_the_end_of_a_prefix() -> None:
    pool = make_pool(3)
    pages = store(pool, [1, 2, 3, 4, 5, 6])
    pool.release(pages)
    assert pool.allocate(1) == pages[2:]
    assert pool.match(ROOT, [1, 2, 3, 4, 5, 6], max_pages=3)[0] == pages[:2]


def test_equal_pages_computed_twice_keep_one_node() -> None:
    pool = make_pool()
    first, second = pool.allocate(1), pool.allocate(1)
    assert first is not None
    assert second is not None
    node, new = pool.register(ROOT, (1, 2), first[0])
    assert new
    assert pool.register(ROOT, (1, 2), second[0]) == (node, False)
    pool.release(second)
    assert pool.num_available == 3


def test_forgetting_keeps_what_others_hold() -> None:
    pool = make_pool()
    pages = store(pool, [1, 2])
    pool.hold(pages)
    pool.release(pages, forget=True)
    assert pool.match(ROOT, [1, 2], max_pages=1)[0] == pages
    pool.release(pages, forget=True)
    assert pool.match(ROOT, [1, 2], max_pages=1)[0] == []
    assert pool.num_available == pool.num_pages


def test_releasing_twice_is_caught() -> None:
    pool = make_pool()
    pages = store(pool, [1, 2])
    pool.release(pages)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release(pages)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "drop", "forget"]), st.integers(0, 2), st.integers(0, 7)), max_size=40))
def test_every_page_is_free_idle_or_held_whatever_happens(actions: list[tuple[str, int, int]]) -> None:
    pool = make_pool(6)
    held: list[list[int]] = []
    for kind, seed, length in actions:
        if kind == "take":
            tokens = [(seed * idx) % 3 for idx in range(length)]
            shared, node = pool.match(ROOT, tokens, max_pages=length // PAGE)
            pool.hold(shared)
            fresh = pool.allocate(length // PAGE - len(shared))
            if fresh is None:
                pool.release(shared)
                continue
            for idx, page in enumerate(fresh, start=len(shared)):
                node, _ = pool.register(node, tuple(tokens[idx * PAGE : (idx + 1) * PAGE]), page)
            held.append(shared + fresh)
        elif held:
            pool.release(held.pop(length % len(held)), forget=kind == "forget")
        pool.check()
    for pages in held:
        pool.release(pages)
    assert pool.num_available == pool.num_pages
    pool.check()


def test_namespaces_never_share_pages() -> None:
    pool = make_pool()
    pool.release(store(pool, [1, 2], root_node(None, "tenant a")))
    assert pool.match(root_node(None, "tenant b"), [1, 2], max_pages=1)[0] == []
    assert len(pool.match(root_node(None, "tenant a"), [1, 2], max_pages=1)[0]) == 1
