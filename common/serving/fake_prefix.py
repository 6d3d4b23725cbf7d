"""The prefix cache of FakeEngine: which contexts have been computed before and are still held.

Works token by token on the context hashes of fake_model.py: a hash stands for a token and everything before it. What was used
longest ago is given up first, and of one context its end before its beginning. Knows no weights: its owner clears it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


class PrefixStore:
    """See the module."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], None] = {}
        """Namespaces and context hashes, least recently used first."""

    @property
    def num_tokens(self) -> int:
        return len(self._held)

    def match(self, namespace: str, context_hashes: Sequence[int]) -> int:
        """How many tokens of a context are held, from its first on. Changes nothing."""
        keys = ((namespace, context_hash) for context_hash in context_hashes)
        return sum(1 for _ in itertools.takewhile(self._held.__contains__, keys))

    def put(self, namespace: str, context_hashes: Sequence[int]) -> None:
        """Hold a context, or note that it was used."""
        for context_hash in reversed(context_hashes):
            self._held.pop((namespace, context_hash), None)
            self._held[namespace, context_hash] = None

    def give_up(self, num_tokens: int) -> int:
        """Forget up to `num_tokens` tokens; returns how many."""
        victims = list(itertools.islice(self._held, max(0, num_tokens)))
        for key in victims:
            del self._held[key]
        return len(victims)

    def clear(self) -> None:
        self._held.clear()
