"""Which replica the next turn goes to: the one with the smallest share of its slots in use. Pure; see least_loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotUse:
    """How many turns a replica has under way, and how many it runs at a time."""

    num_in_flight: int
    num_slots: int


def least_loaded(replicas: Sequence[SlotUse]) -> int | None:
    """Index of the replica with the smallest share of slots in use, the first of equals; None if none has a free slot.

    Turns that find no free slot wait at the caller instead of in a replica's queue: whichever replica is free first then takes
    them, so that a fast one works more and none has a backlog when the batch ends.
    """
    free = [idx for idx, use in enumerate(replicas) if use.num_in_flight < use.num_slots]
    return min(free, key=lambda idx: replicas[idx].num_in_flight / replicas[idx].num_slots, default=None)
