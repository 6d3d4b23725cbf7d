"""A relay near the serving cluster: the slow link to the learner carries every bucket once, replicas read from here.

    python -m scripts.relay --upstream=https://learner:8300 --upstream_ca=ca.pem --upstream_token=file:/run/secrets/learner \\
        --token=file:/run/secrets/cluster --cache=/var/cache/rose --max_gb=200

It prints one line of JSON with its address once it serves, and runs until SIGTERM or Ctrl-C. Its cache may be a folder, `shm:NAME`
(shared memory of this machine) or `memory`; the first two outlive it, so a relay that starts again fetches nothing twice. With
--fan_out it also keeps the tree of replicas that feed each other. It only reads: whoever holds the cluster's token cannot write to
the learner through it. Secrets are named (file:/path or env:NAME), never given.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from absl import flags

from common.transfer.cache import CacheStore, ObjectCache
from common.transfer.peers import PeerRegistry
from common.transfer.relay import RelayStore
from common.transfer.secrets import client_tls, read_secret, server_tls
from common.transfer.store.directory import DirectoryStore, SharedMemoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_UPSTREAM = flags.DEFINE_string(
    "upstream", None, "What to read from: http(s)://host:port, a folder, or a URL such as gs://bucket/run7.", flag_values=_FLAGS
)
_UPSTREAM_TOKEN = flags.DEFINE_string(
    "upstream_token", None, "Token for --upstream, as file:/path or env:NAME.", flag_values=_FLAGS
)
_UPSTREAM_CA = flags.DEFINE_string("upstream_ca", None, "Certificate authority of an https --upstream (PEM).", flag_values=_FLAGS)
_TOKEN = flags.DEFINE_string("token", None, "Token that readers must have, as file:/path or env:NAME.", flag_values=_FLAGS)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; beyond this machine only with --token.", flag_values=_FLAGS)
_PORT = flags.DEFINE_integer("port", 0, "Port to listen on; 0: any free one.", lower_bound=0, upper_bound=65535, flag_values=_FLAGS)
_CERTIFICATE = flags.DEFINE_string("certificate", None, "Serve TLS with this certificate (PEM).", flag_values=_FLAGS)
_PRIVATE_KEY = flags.DEFINE_string("private_key", None, "Key of --certificate (PEM).", flag_values=_FLAGS)
_CLIENT_CA = flags.DEFINE_string("client_ca", None, "Let in only clients with a certificate of this authority.", flag_values=_FLAGS)
_CACHE = flags.DEFINE_string("cache", "memory", "A folder, shm:NAME, or memory.", flag_values=_FLAGS)
_MAX_GB = flags.DEFINE_float("max_gb", 16.0, "Kept in the cache at most (10^9 bytes).", lower_bound=1e-6, flag_values=_FLAGS)
_FAN_OUT = flags.DEFINE_integer(
    "fan_out", 0, "Replicas that one replica feeds; 0: all read here.", lower_bound=0, flag_values=_FLAGS
)
_TIMEOUT_S = flags.DEFINE_float("timeout_s", 60.0, "How long upstream may be silent.", lower_bound=0.1, flag_values=_FLAGS)


SIGNAL_POLL_S = 0.5
"""A signal that comes just before a wait without end would be lost."""


def upstream_store(where: str) -> Store:
    if not where.startswith(("http://", "https://")):
        return DirectoryStore(where if "://" in where else Path(where))
    tls = None
    if where.startswith("https://"):
        if _UPSTREAM_CA.value is None:
            raise ValueError(f"--upstream={where} needs --upstream_ca, the authority that its certificate is checked against")
        tls = client_tls(Path(_UPSTREAM_CA.value))
    token = read_secret(_UPSTREAM_TOKEN.value) if _UPSTREAM_TOKEN.value else None
    return HttpStore(where, token=token, tls=tls, timeout_s=_TIMEOUT_S.value)


def cache_store() -> CacheStore:
    kind, _, name = _CACHE.value.partition(":")
    if kind == "shm":
        return SharedMemoryStore(name)
    return MemoryStore() if _CACHE.value == "memory" else DirectoryStore(Path(_CACHE.value))


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    if (_CERTIFICATE.value is None) != (_PRIVATE_KEY.value is None):
        raise ValueError("--certificate and --private_key go together")
    tls = None
    if _CERTIFICATE.value is not None and _PRIVATE_KEY.value is not None:
        client_ca = Path(_CLIENT_CA.value) if _CLIENT_CA.value else None
        tls = server_tls(Path(_CERTIFICATE.value), Path(_PRIVATE_KEY.value), client_ca=client_ca)
    token = read_secret(_TOKEN.value) if _TOKEN.value else None
    relay = RelayStore(upstream_store(str(_UPSTREAM.value)), ObjectCache(cache_store(), max_bytes=int(_MAX_GB.value * 1e9)))
    on_peer = PeerRegistry(_FAN_OUT.value).on_peer if _FAN_OUT.value else None
    try:
        server = StoreServer(relay, host=_HOST.value, port=_PORT.value, token=token, tls=tls, read_only=True, on_peer=on_peer)
    except OSError as e:
        raise ValueError(f"cannot listen on {_HOST.value}:{_PORT.value}: {e.strerror}; choose another --host or --port") from None
    print(json.dumps({"url": server.url, "upstream": _UPSTREAM.value, "cache": _CACHE.value}), flush=True)
    try:
        while True:
            time.sleep(SIGNAL_POLL_S)
    finally:
        server.close()
        relay.close()


if __name__ == "__main__":
    entry.run(main, required=["upstream"], after_interrupt="What is in the cache stays for the next start.")
