"""Peer: a replica's place among replicas that feed each other. A relay of its own, whose upstream is its parent in the tree.

ParentStore is that upstream. Buckets and layouts come from the parent, and from the relay whenever the parent is dead, slow, wrong
or does not have them; manifest, indexes, catalogue, leases and confirmations are the relay's alone. A parent is slow when the relay
could have given much more of an object meanwhile, so a learner that pauses is nobody's fault; it is reported only after the relay
has done better. A parent is bad when a whole object does not add up: it is not asked again, and the object comes from elsewhere.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import ssl
import threading
import time

from common.transfer.cache import ObjectCache
from common.transfer.errors import AuthenticationError, MalformedUpdateError, TransferError, TransferTimeoutError, UnreachableError
from common.transfer.manifest import MANIFEST_NAME, UpdateHead, UpdateKey
from common.transfer.peers import HEARTBEAT_S, NO_CHILDREN_S, Reason
from common.transfer.relay import FRONT_BYTES, RelayStore
from common.transfer.secrets import Secret
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.protocol import LEASE_TTL_S, Arrived, Catalog, Confirmation, Parts, Store

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""How long a parent may take for an object, or say nothing, before the relay is asked whether it is further."""
PROBE_S = 0.5
AHEAD_SHARE = 8
"""The relay is ahead when it has so much more of an object: one over this of it."""
REMEMBERED_SOURCES = 4096
"""Objects of which it is known who sent them, for the moment when the manifest tells that one was forged."""


class _ElsewhereError(Exception):
    """The parent cannot give an object now. With a reason it is the parent's fault, if the relay can."""

    def __init__(self, why: str, reason: Reason | None) -> None:
        super().__init__(why)
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class _Parent:
    name: str
    url: str
    store: HttpStore


class ParentStore:
    """A Store (see the protocol and the module). Nobody is its parent before `join`."""

    def __init__(
        self,
        relay: HttpStore,
        *,
        name: str,
        token: Secret | None = None,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 60.0,
        patience_s: float = PATIENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self._relay: Store = relay
        self._post = relay.post
        self._name, self._token, self._tls, self._timeout_s = name, token, tls, timeout_s
        self._patience_s, self._heartbeat_s = patience_s, heartbeat_s
        self._url = ""
        self._lock = threading.Lock()
        self._parent: _Parent | None = None
        self._avoid_until_s: dict[str, float] = {}
        self._reports: dict[str, Reason] = {}
        self._sources: collections.OrderedDict[tuple[UpdateKey, str], str] = collections.OrderedDict()
        self._closed, self._wake = False, threading.Event()
        self._thread = threading.Thread(target=self._keep_in_touch, name=f"peer-{name}", daemon=True)

    @property
    def parent_name(self) -> str | None:
        """Whom buckets come from now; None: from the relay."""
        parent = self._parent
        return None if parent is None else parent.name

    def join(self, url: str) -> None:
        """Tell the relay that this replica serves its peers at `url`, now and with every heartbeat. Blocks for the first answer."""
        self._url = url
        self._heartbeat()
        self._thread.start()

    def close(self) -> None:
        """Say goodbye, so that children move on at once."""
        self._closed = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._heartbeat_s)
            self._say_hello(leaving=True, reports={})

    def _keep_in_touch(self) -> None:
        while not self._closed:
            self._wake.wait(self._heartbeat_s)
            self._wake.clear()
            if not self._closed:
                self._heartbeat()

    def _heartbeat(self) -> None:
        with self._lock:
            reports, self._reports = self._reports, {}
        if not self._say_hello(leaving=False, reports=reports):
            with self._lock:
                self._reports = reports | self._reports

    def _say_hello(self, *, leaving: bool, reports: dict[str, Reason]) -> bool:
        fields = {"name": self._name, "url": self._url, "leaving": leaving, "reports": [[a, str(r)] for a, r in reports.items()]}
        try:
            answer = self._post("/peer", fields)
        except TransferError as e:
            log.info("%s: no word from the relay about peers: %s", self._name, e)
            return False
        match answer.get("parent"):
            case {"name": str(name), "url": str(url)}:
                self._take_parent(name, url)
            case _:
                self._parent = None
        return True

    def _take_parent(self, name: str, url: str) -> None:
        parent = self._parent
        if time.monotonic() < self._avoid_until_s.get(name, 0.0):
            self._parent = None
        elif parent is None or (parent.name, parent.url) != (name, url):
            try:
                store = HttpStore(
                    url, token=self._token, tls=self._tls if url.startswith("https") else None, timeout_s=self._timeout_s
                )
            except ValueError as e:
                log.warning("%s: the parent %s cannot be used: %s", self._name, name, e)
                self._parent = None
            else:
                self._parent = _Parent(name, url, store)

    def blame(self, key: UpdateKey, name: str, why: str) -> None:
        """An object turned out wrong: whoever sent it is not asked again."""
        with self._lock:
            source = self._sources.pop((key, name), None)
        if source is not None:
            log.warning("%s: peer %s sent a wrong %s/%s: %s", self._name, source, key.path, name, why)
            self._turn_away(source, Reason.BAD)

    def _turn_away(self, name: str, reason: Reason) -> None:
        with self._lock:
            self._reports[name] = reason
            self._avoid_until_s[name] = time.monotonic() + NO_CHILDREN_S[reason]
            if self._parent is not None and self._parent.name == name:
                self._parent = None
        self._wake.set()

    def read(
        self,
        key: UpdateKey,
        name: str,
        *,
        start: int = 0,
        length: int | None = None,
        into: memoryview | None = None,
        timeout_s: float,
        arrived: Arrived | None = None,
    ) -> memoryview:
        parent = self._parent
        reason: Reason | None = None
        only_front = start == 0 and length is not None and length <= FRONT_BYTES
        if parent is not None and name != MANIFEST_NAME and not only_front:
            try:
                content = self._from_parent(parent, key, name, start, length, into, timeout_s, arrived)
            except _ElsewhereError as e:
                log.info("%s: %s/%s comes from the relay: %s", self._name, key.path, name, e)
                reason = e.reason
            else:
                self._note_source(key, name, parent.name)
                return content
        content = self._relay.read(key, name, start=start, length=length, into=into, timeout_s=timeout_s, arrived=arrived)
        if parent is not None and reason is not None:
            self._turn_away(parent.name, reason)
        return content

    def _from_parent(
        self,
        parent: _Parent,
        key: UpdateKey,
        name: str,
        start: int,
        length: int | None,
        into: memoryview | None,
        timeout_s: float,
        arrived: Arrived | None,
    ) -> memoryview:
        deadline_s = time.monotonic() + timeout_s
        next_look_s = time.monotonic() + self._patience_s

        def watch(content: memoryview, num_bytes: int) -> None:
            nonlocal next_look_s
            if time.monotonic() >= next_look_s and len(content) < num_bytes:
                ahead = min(len(content) + num_bytes // AHEAD_SHARE, num_bytes - 1)
                if self._relay_has(key, name, start + ahead):
                    raise _ElsewhereError(
                        f"{parent.name} has sent {len(content)} of {num_bytes} bytes, the relay has more", Reason.SLOW
                    )
                next_look_s = time.monotonic() + self._patience_s
            if arrived is not None:
                arrived(content, num_bytes)

        relay_had_it = False
        while True:
            patience_s = max(min(self._patience_s, deadline_s - time.monotonic()), 0.1)
            try:
                return parent.store.read(key, name, start=start, length=length, into=into, timeout_s=patience_s, arrived=watch)
            except UnreachableError as e:
                raise _ElsewhereError(str(e), Reason.DEAD) from None
            except TransferTimeoutError as e:
                if relay_had_it:
                    raise _ElsewhereError(str(e), Reason.SLOW) from None
                relay_had_it = self._relay_has(key, name, start)
                if relay_had_it:  # perhaps from this moment on: the parent gets another chance
                    deadline_s = max(deadline_s, time.monotonic() + self._patience_s)
                elif time.monotonic() >= deadline_s:
                    raise
            except (AuthenticationError, MalformedUpdateError) as e:
                raise _ElsewhereError(str(e), Reason.BAD) from None
            except TransferError as e:  # it never had it, or gave it up: the relay knows better
                raise _ElsewhereError(str(e), None) from None

    def _relay_has(self, key: UpdateKey, name: str, offset: int) -> bool:
        try:
            return len(self._relay.read(key, name, start=offset, length=1, timeout_s=PROBE_S)) == 1
        except TransferError:
            return False

    def _note_source(self, key: UpdateKey, name: str, source: str) -> None:
        with self._lock:
            self._sources[key, name] = source
            while len(self._sources) > REMEMBERED_SOURCES:
                self._sources.popitem(last=False)

    def catalog(self, *, after: str | None = None, timeout_s: float = 0.0) -> Catalog:
        return self._relay.catalog(after=after, timeout_s=timeout_s)

    def lease(self, key: UpdateKey, holder: str, ttl_s: float = LEASE_TTL_S) -> None:
        self._relay.lease(key, holder, ttl_s)

    def release(self, key: UpdateKey, holder: str) -> None:
        self._relay.release(key, holder)

    def confirm(self, receiver: str, version: int) -> None:
        self._relay.confirm(receiver, version)

    def confirmations(self) -> dict[str, Confirmation]:
        return self._relay.confirmations()

    def open(self, head: UpdateHead) -> None:
        self._relay.open(head)

    def put(self, key: UpdateKey, name: str, parts: Parts) -> None:
        self._relay.put(key, name, parts)

    def seal(self, key: UpdateKey, manifest: bytes) -> None:
        self._relay.seal(key, manifest)

    def fail(self, key: UpdateKey, text: str) -> None:
        self._relay.fail(key, text)

    def remove(self, key: UpdateKey, *, force: bool = False) -> bool:
        return self._relay.remove(key, force=force)


class Peer:
    """What a replica needs to feed others and be fed: give `store` to its Subscriber. One a replica, shared by its ranks."""

    def __init__(
        self,
        relay: HttpStore,
        cache: ObjectCache,
        *,
        name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_url: str | None = None,
        token: Secret | None = None,
        server_tls: ssl.SSLContext | None = None,
        client_tls: ssl.SSLContext | None = None,
        patience_s: float = PATIENCE_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """
        Args:
            relay: a relay that keeps a registry of peers.
            cache: of this peer alone, in memory, shared memory or on disk; made with the publisher's key, if there is one.
            name: unique among the peers of a relay.
            advertised_url: where the others reach this server, if that is not the address it is bound to.
            token: opens this server and those of the others.
        """
        self._parents = ParentStore(relay, name=name, token=token, tls=client_tls, patience_s=patience_s, heartbeat_s=heartbeat_s)
        self.store = RelayStore(self._parents, cache, on_damaged=self._parents.blame)
        self._server = StoreServer(self.store, host=host, port=port, token=token, tls=server_tls, read_only=True)
        self._parents.join(advertised_url or self._server.url)

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def parent_name(self) -> str | None:
        """Whom buckets come from now; None: from the relay."""
        return self._parents.parent_name

    def close(self) -> None:
        """Leave the tree and stop serving. The cache stays."""
        self._parents.close()
        self._server.close()
        self.store.close()
