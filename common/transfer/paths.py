"""Which updates lead from what a receiver holds to the newest version, and which nobody needs any more. Pure functions.

Versions are the nodes of a graph; a delta leads from its base to its version, an anchor from nothing to its version, and each costs
the bytes it puts on the wire. A receiver takes the cheapest path. Only a path that is whole counts: a gap in the chain (a pruned
delta, a publisher that started anew) leaves the anchor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from common.transfer.manifest import UpdateKey
from common.transfer.store.protocol import RECEIVER_TTL_S, CatalogEntry, Confirmation, UpdateState


@dataclasses.dataclass(frozen=True)
class Held:
    """A version that a receiver has committed, and the publisher life it belongs to."""

    lineage: str
    version: int


@dataclasses.dataclass(frozen=True)
class Path:
    """Updates in the order in which they apply, and what they cost. No updates: nothing newer than what is held can be reached."""

    updates: tuple[CatalogEntry, ...]
    wire_bytes: int


def _cost(entry: CatalogEntry) -> int:
    """Bytes on the wire; of an anchor still being written at least those of its values."""
    if entry.state is UpdateState.OPEN and entry.head.base_version is None:
        return max(entry.wire_bytes, entry.head.dense_bytes)
    return entry.wire_bytes


def newest_path(entries: Sequence[CatalogEntry], held: Held | None, *, version: int | None = None) -> Path | None:
    """The cheapest path to the newest version that can be reached (or to `version`), or None if none can.

    Args:
        entries: oldest first. The newest lineage is that of the last entry that has not failed.
        held: None for a receiver that holds nothing, or whose weights are in doubt.
    """
    alive = [entry for entry in entries if entry.state is not UpdateState.FAILED]
    if not alive:
        return None
    lineage = alive[-1].head.lineage
    best: dict[int, Path] = {}
    if held is not None and held.lineage == lineage:
        best[held.version] = Path((), 0)
    for entry in sorted((e for e in alive if e.head.lineage == lineage), key=lambda e: e.head.version):
        head = entry.head
        before = Path((), 0) if head.base_version is None else best.get(head.base_version)
        if before is None:
            continue
        path = Path((*before.updates, entry), before.wire_bytes + _cost(entry))
        known = best.get(head.version)
        if known is None or (path.wire_bytes, len(path.updates)) < (known.wire_bytes, len(known.updates)):
            best[head.version] = path
    if version is not None:
        return best.get(version)
    return best[max(best)] if best else None


def bytes_of_open(entries: Sequence[CatalogEntry]) -> dict[UpdateKey, int]:
    """How far each update is that is still being written: for `still_moving`, when waiting for one was in vain."""
    return {entry.head.key: entry.wire_bytes for entry in entries if entry.state is UpdateState.OPEN}


def still_moving(entries: Sequence[CatalogEntry], stalled: Mapping[UpdateKey, int]) -> list[CatalogEntry]:
    """Without the open updates that have no more bytes than they had in `stalled`: a receiver takes what is whole meanwhile."""
    return [e for e in entries if e.state is not UpdateState.OPEN or stalled.get(e.head.key) != e.wire_bytes]


def prunable(entries: Sequence[CatalogEntry], confirmations: Mapping[str, Confirmation]) -> list[UpdateKey]:
    """Updates that no receiver will want: not those that lead from the newest anchor to the newest version, nor those by which a
    receiver seen lately catches up more cheaply than by the anchor, nor any that is still being written. Leases are not looked at.
    """
    sealed = [entry for entry in entries if entry.state is UpdateState.SEALED]
    if not sealed:
        return []
    lineage = max(sealed, key=lambda e: e.head.version).head.lineage
    anchors = [e for e in sealed if e.head.base_version is None and e.head.lineage == lineage]
    if not anchors:
        return [e.head.key for e in entries if e.state is UpdateState.FAILED]
    anchor = max(anchors, key=lambda e: e.head.version)
    wanted = {anchor.head.key} | {e.head.key for e in entries if e.state is UpdateState.OPEN}
    ours = [e for e in sealed if e.head.lineage == lineage]
    wanted |= {e.head.key for e in ours if e.head.version > anchor.head.version}
    for confirmation in confirmations.values():
        if confirmation.age_s < RECEIVER_TTL_S:
            wanted |= _keys(newest_path(ours, Held(lineage, confirmation.version)))
    return [e.head.key for e in entries if e.head.key not in wanted]


def _keys(path: Path | None) -> set[UpdateKey]:
    return {entry.head.key for entry in path.updates} if path else set()
