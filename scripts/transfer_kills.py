"""A learner, a relay and replicas that feed each other, as processes that can be killed: the parts of check_transfer and its test.

The learner's store is paced, so that transfers last long enough to be hit. Weights are a function of the version: a learner that
starts again publishes what the dead one would have, as a new life, and anybody can say what a replica of a version must hold.
A replica answers at any time, between two commits, with its version and the checksum of its live weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from common import check_installation
from common.transfer import shards
from common.transfer.cache import ObjectCache
from common.transfer.errors import TransferError
from common.transfer.manifest import UpdateKey
from common.transfer.peer_store import Peer
from common.transfer.publisher import Publisher
from common.transfer.secrets import read_secret
from common.transfer.store.http_client import HttpStore
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Arrived
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from scripts import entry, transfer_data
from scripts.transfer_sync import checksum_of

log = logging.getLogger(__name__)

LEARNER, RELAY = "learner", "relay"
PACE_BYTES_PER_S = 2e6
PACE_PIECE_BYTES = 20_000
BUCKET_BYTES = 1_000_000
"""Small, so that an update of a few MB has several."""
CHANGED_SHARE = 0.25
FAN_OUT = 2
TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
SHAPES = transfer_data.qwen3_shapes(num_layers=2, vocab_size=4000, hidden=256, intermediate=768)


@functools.cache
def _base() -> transfer_data.Weights:
    return transfer_data.model_weights(SHAPES)


def weights_at(version: int) -> transfer_data.Weights:
    return transfer_data.step_model(_base(), CHANGED_SHARE, version)


@functools.cache
def checksum_at(version: int) -> int:
    return checksum_of(weights_at(version))


class PacedStore(MemoryStore):
    """Hands out objects piece by piece, no faster than PACE_BYTES_PER_S each."""

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
        content = super().read(key, name, start=start, length=length, into=into, timeout_s=timeout_s)
        if arrived is not None:
            for end in range(PACE_PIECE_BYTES, len(content), PACE_PIECE_BYTES):
                arrived(content[:end], len(content))
                time.sleep(PACE_PIECE_BYTES / PACE_BYTES_PER_S)
        return content


@dataclasses.dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class KillableCluster:
    """Everything there is, and a way to kill and restart each part. Use as a context."""

    def __init__(self, folder: Path, num_replicas: int) -> None:
        self._folder = folder
        self.replica_names = [f"r{i}" for i in range(num_replicas)]
        self._token = folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(os.urandom(16).hex())
        self._ports = {name: _free_port() for name in (LEARNER, RELAY)}
        self._relay: subprocess.Popen[str] | None = None
        self._workers: dict[str, _Worker] = {}
        self.torn: list[str] = []
        """What a replica held that no version is: must stay empty."""

    def __enter__(self) -> KillableCluster:
        with contextlib.ExitStack() as undo:  # a process that is left would hold up the end of this one
            undo.push(self.__exit__)
            self.start(LEARNER)
            self.publish(0)
            self.start(RELAY)
            for name in self.replica_names:
                self.start(name)
            undo.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (*self.replica_names, RELAY, LEARNER):
            self.kill(name)

    def start(self, name: str) -> None:
        if name == RELAY:
            self._start_relay()
            return
        os.environ["PYTHONSAFEPATH"] = "1"
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        role, port = (_learner, self._ports[LEARNER]) if name == LEARNER else (_replica, self._ports[RELAY])
        process = context.Process(target=role, args=(theirs, name, port, f"file:{self._token}"))
        process.start()
        theirs.close()
        self._workers[name] = _Worker(process, ours)
        if not ours.poll(START_TIMEOUT_S):
            raise RuntimeError(f"{name} did not start within {START_TIMEOUT_S} s")
        assert ours.recv() == "ready"

    def _start_relay(self) -> None:
        command = [sys.executable, "-m", "scripts.relay", f"--upstream=http://127.0.0.1:{self._ports[LEARNER]}"]
        command += [f"--upstream_token=file:{self._token}", f"--token=file:{self._token}", f"--port={self._ports[RELAY]}"]
        command += [f"--cache={self._folder / 'cache'}", f"--fan_out={FAN_OUT}", f"--timeout_s={TIMEOUT_S}"]
        with (self._folder / "relay.log").open("a") as relay_log:
            environment = os.environ | {"PYTHONPATH": str(entry.ROOT)}
            self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=relay_log, text=True, env=environment)
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise RuntimeError(f"the relay did not start: {(self._folder / 'relay.log').read_text()[-500:]}")

    def kill(self, name: str) -> None:
        """SIGKILL, if it runs."""
        if name == RELAY:
            if self._relay is not None:
                self._relay.send_signal(signal.SIGKILL)
                self._relay.wait()
                self._relay = None
        elif name in self._workers:
            self._workers.pop(name).kill()

    def publish(self, version: int) -> None:
        """Have the learner publish; returns at once."""
        self._workers[LEARNER].pipe.send(version)

    def versions(self) -> dict[str, int | None]:
        """What every replica that runs holds now; whatever is not a whole version goes into `torn`."""
        found: dict[str, int | None] = {}
        for name in self.replica_names:
            if name in self._workers:
                pipe = self._workers[name].pipe
                pipe.send("state")
                if not pipe.poll(START_TIMEOUT_S):
                    raise RuntimeError(f"{name} does not answer")
                version, checksum = pipe.recv()
                if version is not None and checksum != checksum_at(version):
                    self.torn.append(f"{name} says it holds version {version}, its weights do not")
                found[name] = version
        return found

    def wait_for(self, version: int, timeout_s: float) -> float:
        """Seconds until every replica holds this version.

        Raises:
            RuntimeError: some do not after `timeout_s`.
        """
        started_s = time.monotonic()
        while set(found := self.versions()) != set(self.replica_names) or set(found.values()) != {version}:
            if time.monotonic() - started_s > timeout_s:
                raise RuntimeError(f"after {timeout_s} s the replicas hold {found}, not version {version}")
            time.sleep(0.02)
        return time.monotonic() - started_s


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _learner(pipe: Connection, name: str, port: int, token_source: str) -> None:
    check_installation(__file__)
    shards.BUCKET_BYTES = BUCKET_BYTES
    store = PacedStore()
    publisher = Publisher(store, key=_key(token_source), anchor_interval=8)
    server = StoreServer(store, port=port, token=read_secret(token_source))
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            version = pipe.recv()
            publisher.publish(version, weights_at(version))
    server.close()


def _key(token_source: str) -> bytes:
    """Of learner and replicas; the relay does not know what it means."""
    return b"manifests:" + read_secret(token_source).value


def _replica(pipe: Connection, name: str, relay_port: int, token_source: str) -> None:
    check_installation(__file__)
    shards.BUCKET_BYTES = BUCKET_BYTES
    token, key = read_secret(token_source), _key(token_source)
    relay = HttpStore(f"http://127.0.0.1:{relay_port}", token=token, timeout_s=TIMEOUT_S)
    peer = Peer(relay, ObjectCache(MemoryStore(), max_bytes=1 << 28, key=key), name=name, token=token)
    arrays = {tensor: np.zeros_like(array) for tensor, array in _base().items()}
    subscriber = Subscriber(peer.store, NumpyTarget(arrays), receiver_id=name, key=key, timeout_s=TIMEOUT_S)
    between_steps = threading.Lock()
    threading.Thread(target=_follow, args=(subscriber, between_steps), daemon=True).start()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while pipe.recv() == "state":
            with between_steps:
                answer = (subscriber.version, checksum_of(arrays))
            pipe.send(answer)
    os._exit(0)


def _follow(subscriber: Subscriber, between_steps: threading.Lock) -> None:
    """What every replica does: follow, whatever goes wrong."""
    while True:
        try:
            if subscriber.poll(1.0) is not None:
                staged = subscriber.stage()
                with between_steps:
                    if staged is not None:
                        subscriber.commit(staged)
        except TransferError as e:
            log.info("going on: %s: %s", type(e).__name__, e)
            time.sleep(0.1)
