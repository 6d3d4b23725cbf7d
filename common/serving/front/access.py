"""Who may call what: separate bearer tokens for online clients, rollouts and control, and how much one client may ask for at once.

Online calls are open on a loopback address without tokens; rollouts and control always need theirs, so that nothing that runs on
the machine, a web page in a browser included, reaches weights by chance. Prefix caches are shared within a client's own token and
interface and never across: `Client.cache_namespace` says with whom.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Iterator, Sequence

from common.serving.front.errors import ApiError, too_many
from common.transfer.secrets import Secret
from common.transfer.store.http_server import is_loopback


class Interface(enum.StrEnum):
    """The three kinds of callers."""

    ONLINE = "online"
    ROLLOUT = "rollout"
    CONTROL = "control"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Client:
    """Whom limits count against: a token used from an address."""

    interface: Interface
    name: str
    cache_namespace: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The secrets of each interface; online clients may have several, which share no cache."""

    online: Sequence[Secret] = ()
    rollout: Secret | None = None
    control: Secret | None = None

    def check_address(self, host: str) -> None:
        """Raises ValueError if `host` can be reached from other machines and online calls would be open to them."""
        if not is_loopback(host) and not self.online:
            raise ValueError(f"--host={host} can be reached from other machines; give --online_token, or listen on 127.0.0.1")

    def identify(self, interface: Interface, authorization: str | None, peer: str) -> Client:
        """The client that a call with this Authorization header comes from.

        Raises:
            ApiError: 401, the token is missing or wrong; 403, the interface is not open at all.
        """
        if interface is Interface.ONLINE:
            secrets = self.online
            if not secrets:
                return Client(interface=interface, name=f"online {peer}", cache_namespace="online")
        else:
            secret = self.rollout if interface is Interface.ROLLOUT else self.control
            if secret is None:
                message = f"this server has no {interface} token, so its {interface} interface is closed; start it with "
                raise ApiError(403, f"{message}--{interface}_token=file:/path", kind="permission_error", code="closed")
            secrets = (secret,)
        scheme, _, offered = (authorization or "").partition(" ")
        matching = [idx for idx, secret in enumerate(secrets) if secret.matches(offered)]  # all of them: no timing tells which
        if scheme.lower() != "bearer" or not matching:
            raise ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", code="invalid_api_key")
        name = f"{interface}/{matching[0]}"
        return Client(interface=interface, name=f"{name} {peer}", cache_namespace=name)


class ConcurrencyLimit:
    """How many completions a client may have under way at a time."""

    def __init__(self, max_per_client: int) -> None:
        self._max = max_per_client
        self._under_way: dict[str, int] = {}

    @contextlib.contextmanager
    def hold(self, client: Client, num_completions: int) -> Iterator[None]:
        """Raises ApiError 429 if the client would have too many."""
        under_way = self._under_way.get(client.name, 0)
        if under_way + num_completions > self._max:
            raise too_many(
                f"{under_way} completions of this client are under way and {num_completions} more would exceed its limit of "
                f"{self._max}; wait for some to end"
            )
        self._under_way[client.name] = under_way + num_completions
        try:
            yield
        finally:
            self._under_way[client.name] -= num_completions
            if not self._under_way[client.name]:
                del self._under_way[client.name]
