"""The pages of one cache chunk: who holds them, which are free, and which prefixes they store. Pure host code, no arrays.

A full page may be registered under (node of the page before it, its tokens); equal beginnings then share pages. A node's number is
never given twice, so a key names one exact token sequence: no hash stands for tokens. A registered page that nobody holds stays,
oldest first out, until its room is needed.
Invariant: every page is free, idle (registered, held by nobody) or held by at least one request; never two of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Node = int | tuple[int | None, str]
"""What a page's key hangs on: the number of the page before it, or for a first page its tag and namespace."""


def root_node(tag: int | None, namespace: str) -> Node:
    """Parent of first pages. Namespaces never meet; nor do tags, one for each set of weights (None: untagged)."""
    return tag, namespace


class PagePool:
    """See the module. `chunk_idx` is the chunk's place among the live ones, kept by the scheduler."""

    _node_numbers = itertools.count()

    def __init__(self, *, num_pages: int, page_tokens: int, chunk_idx: int) -> None:
        self.chunk_idx = chunk_idx
        self.num_pages = num_pages
        self._page_tokens = page_tokens
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._nodes: dict[tuple[Node, tuple[int, ...]], tuple[int, int]] = {}  # (parent, tokens) -> (node, page)
        self._keys: dict[int, tuple[Node, tuple[int, ...]]] = {}  # page -> its key in _nodes
        self._idle: dict[int, None] = {}  # in the order in which they were left

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        """Pages kept for reuse only."""
        return len(self._idle)

    def allocate(self, num_pages: int) -> list[int] | None:
        """That many pages for one holder, all or none. Idle pages are taken, the longest idle first, when none is free."""
        if num_pages > self.num_available:
            return None
        pages = []
        for _ in range(num_pages):
            if not self._free:
                oldest = next(iter(self._idle))
                self.forget(oldest)
            page = self._free.pop()
            self._holders[page] = 1
            pages.append(page)
        return pages

    def match(self, root: Node, token_ids: Sequence[int], *, max_pages: int) -> tuple[list[int], Node]:
        """Pages that store the longest known beginning of `token_ids`, in order, and the node of the last (or `root`)."""
        node, pages = root, []
        for page_idx in range(max_pages):
            start = page_idx * self._page_tokens
            found = self._nodes.get((node, tuple(token_ids[start : start + self._page_tokens])))
            if found is None:
                break
            node = found[0]
            pages.append(found[1])
        return pages, node

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that `match` returned."""
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1

    def num_idle_among(self, pages: Sequence[int]) -> int:
        return sum(page in self._idle for page in pages)

    def register(self, parent: Node, token_ids: tuple[int, ...], page: int) -> tuple[int, bool]:
        """Offer a held, full page for reuse.

        Returns:
            The node of this prefix, and whether `page` is what stores it (False: another page already does).
        """
        assert self._holders[page] > 0, f"page {page} is offered by nobody who holds it"
        assert page not in self._keys, f"page {page} is offered twice"
        assert len(token_ids) == self._page_tokens, f"page {page} is not full"
        known = self._nodes.get((parent, token_ids))
        if known is not None:
            return known[0], False
        node = next(self._node_numbers)
        self._nodes[parent, token_ids] = (node, page)
        self._keys[page] = (parent, token_ids)
        return node, True

    def forget(self, page: int) -> None:
        """Stop offering a page for reuse; an idle one becomes free. Unregistered pages do not change."""
        key = self._keys.pop(page, None)
        if key is None:
            return
        del self._nodes[key]
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)

    def forget_all(self) -> None:
        for page in list(self._keys):
            self.forget(page)

    def release(self, pages: Sequence[int], *, forget: bool = False) -> None:
        """Take one holder off each page. Pages nobody holds any more become idle, or free when unregistered or `forget`."""
        for page in reversed(pages):  # the end of a prefix is useless without its beginning, so it goes first
            assert self._holders[page] > 0, f"page {page} is released but nobody holds it"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._keys:
                    self._idle[page] = None
                    if forget:
                        self.forget(page)
                else:
                    self._free.append(page)

    def check(self) -> None:
        """Assert the module's invariant (for tests)."""
        free, idle = set(self._free), set(self._idle)
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        assert len(free) == len(self._free)
        assert len(free) + len(idle) + len(held) == self.num_pages
        assert free | idle | held == set(range(self.num_pages))
        assert idle <= set(self._keys)
        assert not free & set(self._keys)
        assert {key: page for page, key in self._keys.items()} == {key: page for key, (_, page) in self._nodes.items()}
