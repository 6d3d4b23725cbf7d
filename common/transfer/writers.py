"""How several learner processes make one update: each writes the buckets of its own runs, the first opens and seals it.

The first process decides what an update is (a delta to which base, or an anchor) and announces its head; the others look it up in
the catalogue. Each puts its buckets, then its part of the manifest; the first waits for all parts, adds them up and seals. Who
fails withdraws the update with its text, who falls silent is found out after `timeout_s`; either way every process sees the same
end, and the next version starts with an anchor. Refused: processes that disagree about the layout, and a base that not all of them
hold.
"""

from __future__ import annotations

import dataclasses
import time
import uuid

from common.transfer import fingerprint
from common.transfer.errors import LayoutMismatchError, MalformedUpdateError, TransferTimeoutError, WrongBaseError
from common.transfer.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    BucketSummary,
    Manifest,
    UpdateHead,
    UpdateKind,
    parse_manifest,
    part_name,
)
from common.transfer.shards import WeightLayout
from common.transfer.store.protocol import Catalog, CatalogEntry, Store, UpdateState, failed

POLL_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writers:
    """Which of several processes this one is. `lineage` is the same on all of them, and another one in every life of the learner.

    `timeout_s` bounds the wait for another process: for the slowest part of an update.
    """

    writer: int = 0
    num_writers: int = 1
    lineage: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:16])
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        if not 0 <= self.writer < self.num_writers:
            raise ValueError(f"writer={self.writer} must be one of the {self.num_writers} from 0 on")

    @property
    def is_first(self) -> bool:
        return self.writer == 0

    def announced(self, store: Store, version: int, kinds: tuple[UpdateKind, ...]) -> UpdateHead:
        """Wait for the head that the first process opens for a version, as one of these kinds.

        Raises:
            FarSideError: it was withdrawn already.
            TransferTimeoutError: it did not come within `timeout_s`.
        """
        deadline_s = time.monotonic() + self.timeout_s
        catalog = store.catalog()
        while True:
            opened = {e.head.key.kind: e for e in _ours(catalog, self.lineage) if e.head.version == version}
            entry = next((opened[kind] for kind in kinds if kind in opened), None)
            if entry is not None and entry.state is UpdateState.FAILED:
                raise failed(entry.head.key, entry.error or "no reason given")
            if entry is not None:
                return entry.head
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransferTimeoutError(
                    f"writer {self.writer}: the first process announced no version {version} within {self.timeout_s} s"
                )
            catalog = store.catalog(after=catalog.tag, timeout_s=min(left_s, POLL_S))

    def check(self, head: UpdateHead, mine: UpdateHead) -> None:
        """Compare what the first process announced with what this process can contribute to."""
        if head.layout_digest != mine.layout_digest:
            raise LayoutMismatchError(
                f"{head.key.path}: writer {self.writer} lays the model out otherwise than the first process; shapes and shardings "
                "of the weights must be the same on all of them"
            )
        if head.base_version is not None and head.base_version != mine.base_version:
            raise WrongBaseError(
                f"{head.key.path}: writer {self.writer} holds version {mine.base_version} and not the base {head.base_version}"
            )

    def seal(self, store: Store, layout: WeightLayout, part: Manifest, key: bytes | None) -> Manifest:
        """Complete an update of which this process has put its buckets. Returns the manifest of all of it once it is sealed."""
        if self.num_writers == 1:
            store.seal(part.head.key, part.to_bytes(key))
            return part
        if not self.is_first:
            mine = dataclasses.replace(part, writer=self.writer)
            store.put(part.head.key, part_name(self.writer), [mine.to_bytes(key)])
            # Longer than the first process waits for the last part, so that its word on the update comes before our despair.
            payload = store.read(part.head.key, MANIFEST_NAME, length=MAX_MANIFEST_BYTES, timeout_s=2 * self.timeout_s)
            return parse_manifest(payload, key)
        parts = [part]
        for writer in range(1, self.num_writers):
            name = part_name(writer)
            payload = store.read(part.head.key, name, length=MAX_MANIFEST_BYTES, timeout_s=self.timeout_s)
            parts.append(parse_manifest(payload, key, writer=writer))
        manifest = added_up(layout, parts)
        store.seal(part.head.key, manifest.to_bytes(key))
        return manifest


def added_up(layout: WeightLayout, parts: list[Manifest]) -> Manifest:
    """The manifest of an update from the parts of its writers, in their order.

    Raises:
        MalformedUpdateError: a part is of another update, or has not the buckets of its writer.
    """
    head = parts[0].head
    summaries: dict[int, BucketSummary] = {}
    totals: dict[int, int] = {}
    for writer, part in enumerate(parts):
        mine = [i for i, bucket in enumerate(layout.buckets) if bucket.writer == writer]
        if part.head != head or len(part.buckets) != len(mine):
            raise MalformedUpdateError(
                f"{head.key.path}: writer {writer} put {len(part.buckets)} buckets of {part.head}, {len(mine)} are its own"
            )
        summaries |= zip(mine, part.buckets, strict=True)
        for tensor_idx, value in part.fingerprints.items():
            totals[tensor_idx] = fingerprint.add(totals.get(tensor_idx, 0), value)
    return Manifest(
        head=head,
        buckets=tuple(summaries[i] for i in range(len(layout.buckets))),
        fingerprints=dict(sorted(totals.items())),
        changed_elements=sum(part.changed_elements for part in parts),
    )


def newest_anchor(catalog: Catalog, lineage: str) -> int | None:
    """The version of the newest sealed anchor of a lineage: the same for every process that looks before the next is sealed."""
    sealed = (e.head for e in _ours(catalog, lineage) if e.state is UpdateState.SEALED and e.head.base_version is None)
    return max((head.version for head in sealed), default=None)


def _ours(catalog: Catalog, lineage: str) -> list[CatalogEntry]:
    return [entry for entry in catalog.entries if entry.head.lineage == lineage]
