"""Every store there is, so that one suite runs over all of them."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.transfer.cache import ObjectCache
from common.transfer.relay import RelayStore
from common.transfer.secrets import Secret
from common.transfer.store.directory import DirectoryStore, SharedMemoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store

STORES = ("memory", "directory", "fsspec", "shared memory", "http", "http on a directory", "relay", "http on a relay")


@pytest.fixture
def token() -> Secret:
    return Secret(os.urandom(16).hex().encode(), "test")


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path, token: Secret) -> Iterator[Store]:
    name = uuid.uuid4().hex
    match request.param:
        case "memory":
            yield MemoryStore()
        case "directory":
            yield DirectoryStore(tmp_path / "store")
        case "fsspec":
            yield DirectoryStore(f"memory://{name}")
        case "shared memory":
            yield SharedMemoryStore(name, root=tmp_path)
        case "relay":
            relay = RelayStore(MemoryStore(), ObjectCache(MemoryStore(), max_bytes=1 << 30))
            yield relay
            relay.close()
        case "http on a relay":
            learner = StoreServer(MemoryStore(), token=token)
            upstream = HttpStore(learner.url, token=token, timeout_s=10.0)
            relay = RelayStore(upstream, ObjectCache(SharedMemoryStore(name, root=tmp_path), max_bytes=1 << 30))
            near = StoreServer(relay, token=token)
            yield HttpStore(near.url, token=token, timeout_s=10.0)
            near.close()
            relay.close()
            learner.close()
        case _:
            backing = MemoryStore() if request.param == "http" else DirectoryStore(tmp_path / "store")
            server = StoreServer(backing, token=token)
            yield HttpStore(server.url, token=token, timeout_s=10.0)
            server.close()
