"""PeerTree: which replica takes updates from which. A pure policy, and the registry that runs it behind a relay.

Replicas form a tree below the relay. A new or orphaned one goes to the free place nearest to the relay; what is deeper than it
need be moves up. A replica that is silent for EXPIRY_S, says goodbye, or is reported by its children as dead, slow or bad, loses
its children; bad ones get none for a long time. Bad bytes pass through honest replicas too (they pass on what they have not seen
whole), so a replica that itself reported its parent a moment before or after is excused.

Invariants: no cycles; nobody has more than `fan_out` children, the relay only while there is no other place; nobody below a replica
that is gone or reported. The same events give the same tree. It is advice: what a parent sends is checked like anything else.
"""

from __future__ import annotations

import dataclasses
import enum
import threading

from common.clock import Clock, MonotonicClock
from common.transfer.errors import MalformedUpdateError
from common.transfer.store.protocol import check_holder

HEARTBEAT_S = 2.0
EXPIRY_S = 7.0
"""Three heartbeats missed, and a bit: a replica whose host is busy is not thrown out for one late answer."""
EXCUSE_S = 20.0
"""Reports about bad bytes that belong to one event arrive within this."""
MAX_URL_CHARS = 300


class Reason(enum.StrEnum):
    """Why a child turned away from its parent."""

    DEAD = "dead"
    SLOW = "slow"
    BAD = "bad"


NO_CHILDREN_S = {Reason.DEAD: 10.0, Reason.SLOW: 60.0, Reason.BAD: 3600.0}
"""How long a replica that was reported gets no children."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """A replica joined or is still there."""

    name: str


@dataclasses.dataclass(frozen=True)
class Left:
    """A replica said goodbye."""

    name: str


@dataclasses.dataclass(frozen=True)
class Reported:
    """A replica turned away from its parent, and the relay did better."""

    by: str
    about: str
    reason: Reason


Event = Seen | Left | Reported


@dataclasses.dataclass(frozen=True)
class NewParent:
    """A decision: from now on `child` reads from `parent`, or from the relay (None)."""

    child: str
    parent: str | None


@dataclasses.dataclass
class _Member:
    serial: int
    parent: str | None
    seen_s: float
    childless_until_s: float = -1e18
    bad_since_s: float = -1e18
    reported_bad_s: float = -1e18


class PeerTree:
    """See the module. `fan_out`: children of a replica and of the relay, which is the root."""

    def __init__(self, fan_out: int) -> None:
        if fan_out < 1:
            raise ValueError(f"fan_out={fan_out} must be at least 1 child; without peers let every replica read from the relay")
        self._fan_out = fan_out
        self._members: dict[str, _Member] = {}
        self._num_joined = 0

    @property
    def parents(self) -> dict[str, str | None]:
        return {name: member.parent for name, member in self._members.items()}

    def on_event(self, event: Event, now_s: float) -> list[NewParent]:
        """Take an event and say whose parent changes. Late, repeated and unknown ones do no harm."""
        before = self.parents
        match event:
            case Seen(name):
                self._seen(name, now_s)
            case Left(name):
                self._members.pop(name, None)
            case Reported(by, about, reason):
                self._report(by, about, reason, now_s)
        for name in [name for name, member in self._members.items() if now_s - member.seen_s > EXPIRY_S]:
            del self._members[name]
        self._settle(now_s)
        return [NewParent(name, parent) for name, parent in self.parents.items() if name not in before or before[name] != parent]

    def _seen(self, name: str, now_s: float) -> None:
        member = self._members.get(name)
        if member is None:
            self._num_joined += 1
            self._members[name] = _Member(self._num_joined, None, now_s)
            self._attach(name, now_s)
        else:
            member.seen_s = max(member.seen_s, now_s)

    def _report(self, by: str, about: str, reason: Reason, now_s: float) -> None:
        accuser, accused = self._members.get(by), self._members.get(about)
        if accuser is None or accused is None or by == about:
            return
        if reason is Reason.BAD:
            accuser.reported_bad_s = now_s
            if now_s - accuser.bad_since_s < EXCUSE_S:  # it only passed on what it got
                accuser.childless_until_s = accuser.bad_since_s = -1e18
            if now_s - accused.reported_bad_s < EXCUSE_S:
                return
            accused.bad_since_s = now_s
        accused.childless_until_s = max(accused.childless_until_s, now_s + NO_CHILDREN_S[reason])

    def _settle(self, now_s: float) -> None:
        """Restore the invariants with few moves: orphans first, then whoever stands too deep or crowds the relay."""
        for name, member in self._members.items():
            if member.parent is not None and not self._may_have_children(member.parent, now_s):
                self._attach(name, now_s)
        while len(self._children(None)) > self._fan_out:
            newest = max(self._children(None), key=lambda name: self._members[name].serial)
            place = self._place(newest, now_s, root=False)
            if place is None:
                break
            self._members[newest].parent = place
        while self._members:
            depth, _, deepest = max((self._depth(name), member.serial, name) for name, member in self._members.items())
            parent = self._place(deepest, now_s, root=len(self._children(None)) < self._fan_out)
            if (parent is None and len(self._children(None)) >= self._fan_out) or self._depth(parent) + 1 >= depth:
                return
            self._members[deepest].parent = parent

    def _attach(self, name: str, now_s: float) -> None:
        """Give a replica, with all below it, the free place nearest to the relay; the relay itself if there is none."""
        self._members[name].parent = None
        self._members[name].parent = self._place(name, now_s, root=len(self._children(None)) <= self._fan_out)

    def _place(self, name: str, now_s: float, *, root: bool) -> str | None:
        """The parent nearest to the relay that has room and does not stand below `name`; None: the relay (if `root`), or nobody."""
        if root:
            return None
        open_to = [
            (self._depth(parent), member.serial, parent)
            for parent, member in self._members.items()
            if self._may_have_children(parent, now_s)
            and sum(child != name for child in self._children(parent)) < self._fan_out
            and name not in self._path(parent)
        ]
        return min(open_to)[2] if open_to else None

    def _may_have_children(self, name: str, now_s: float) -> bool:
        member = self._members.get(name)
        return member is not None and now_s >= member.childless_until_s

    def _children(self, parent: str | None) -> list[str]:
        return [name for name, member in self._members.items() if member.parent == parent]

    def _path(self, name: str | None) -> list[str]:
        """A replica and all above it."""
        path = []
        while name is not None and name in self._members:
            path.append(name)
            name = self._members[name].parent
        return path

    def _depth(self, name: str | None) -> int:
        """Hops from the relay."""
        return len(self._path(name))


class PeerRegistry:
    """The tree of the replicas behind one relay, fed by their heartbeats (POST /peer). Thread-safe; forgets all when it ends, and
    learns it again from the next heartbeats."""

    def __init__(self, fan_out: int, clock: Clock | None = None) -> None:
        self._tree = PeerTree(fan_out)
        self._urls: dict[str, str] = {}
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()

    def on_peer(self, fields: dict[str, object]) -> dict[str, object]:
        """Answer a heartbeat.

        Args:
            fields: {"name", "url", "leaving", "reports": [[about, reason], ...]}. Answered by {"parent": {"name", "url"} or null}.
        """
        name, url, reports = check_holder(str(fields["name"])), str(fields["url"]), fields["reports"]
        if not url.startswith(("http://", "https://")) or len(url) > MAX_URL_CHARS:
            raise MalformedUpdateError(f"{url!r:.80} is not the http:// or https:// address of a peer")
        if not isinstance(reports, list) or not all(isinstance(report, list) and len(report) == 2 for report in reports):
            raise MalformedUpdateError("reports are [about, reason] each")
        with self._lock:
            now_s = self._clock.now_s()
            if fields["leaving"] is True:
                self._tree.on_event(Left(name), now_s)
                self._urls.pop(name, None)
                return {"parent": None}
            self._urls[name] = url
            self._tree.on_event(Seen(name), now_s)
            for about, reason in reports:
                self._tree.on_event(Reported(name, str(about), Reason(reason)), now_s)
            parents = self._tree.parents
            self._urls = {peer: self._urls[peer] for peer in parents}
            parent = parents[name]
            return {"parent": None if parent is None else {"name": parent, "url": self._urls[parent]}}
