"""A whole replica over the fake engine: in a thread of this process (FakeServer), or a process of its own for those that die.

    python -m tests.common.serving.fake_replica --store=URL --ready_file=F --rollout_token=file:R --control_token=file:C

Front, channel, engine and subscriber are the real ones; only the model is not. The flags are those of scripts.serve.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from common.rollout.chat import ChatTokenizer
from common.serving.engine import StepPlan
from common.serving.fake import FakeEngine
from common.serving.fake_model import make_weights
from common.serving.front.access import Tokens
from common.serving.front.channel import Channel
from common.serving.front.engine_client import EngineClient
from common.serving.front.engine_server import EngineServer
from common.serving.front.front import Front, Limits
from common.serving.front.server import FrontServer, address_of, listen
from common.serving.remote import RemoteAddress
from common.serving.remote_process import end_with_owner
from common.serving.replica import LocalReplica
from common.transfer.secrets import Secret, read_secret
from common.transfer.staging import StagedUpdate
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.protocol import Store
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from common.types import Request

VOCAB_SIZE = 20
TIMEOUT_S = 60.0
ROLLOUT_TOKEN, CONTROL_TOKEN = (Secret(f"{kind}-token-of-tests".encode(), "test") for kind in ("rollout", "control"))
TOKENS = Tokens(rollout=ROLLOUT_TOKEN, control=CONTROL_TOKEN)


class NotingEngine(FakeEngine):
    """Its steps take time, it keeps the requests it was given, and it fails when told to."""

    step_s = 0.0
    fault: str | None = None

    def __init__(self, vocab_size: int = VOCAB_SIZE, **options: object) -> None:
        defaults: dict[str, object] = {"max_slots": 4, "max_context_tokens": 64, "prefix_reuse": True}
        super().__init__(make_weights(99, vocab_size), **defaults | options)  # type: ignore[arg-type]
        self.requests: list[Request] = []

    def add(self, request: Request) -> None:
        super().add(request)
        self.requests.append(request)

    def submit(self, plan: StepPlan) -> None:
        time.sleep(self.step_s)
        if self.fault is not None:
            raise RuntimeError(self.fault)
        super().submit(plan)


class FakeEngineTarget(NumpyTarget):
    """Applies an update to numpy arrays and commits them to the engine they belong to."""

    def __init__(self, engine: FakeEngine) -> None:
        self.arrays = {name: value * 0 for name, value in make_weights(0, engine.info.vocab_size).items()}
        self._engine = engine
        super().__init__(self.arrays)

    def apply(self, update: StagedUpdate) -> None:
        super().apply(update)
        self._engine.commit(self.arrays, version=update.version)


def local_replica(engine: FakeEngine, target: FakeEngineTarget, store: Store, replica_id: str = "r") -> LocalReplica:
    return LocalReplica(replica_id, engine, Subscriber(store, target, receiver_id=replica_id), max_step_tokens=256)


async def serve(
    engine: FakeEngine,
    target: FakeEngineTarget,
    listener: socket.socket,
    open_store: Callable[[str], Store],
    *,
    store: str,
    tokens: Tokens = TOKENS,
    on_ready: Callable[[FrontServer], None],
) -> str | None:
    """Serve until stopped, without weights until they are staged. Returns what the engine said if it failed."""
    ours, theirs = socket.socketpair()

    async def serve_engine() -> None:
        channel = await Channel.over(theirs)
        async with local_replica(engine, target, open_store(store)) as replica:
            server = EngineServer(
                channel,
                replica,
                target,
                info=engine.info,
                subscribe=lambda address: Subscriber(open_store(address), target, receiver_id="r"),
                store=store,
            )
            await server.serve()

    serving = asyncio.create_task(serve_engine())
    client = await EngineClient.connect(await Channel.over(ours))
    engine_run = asyncio.create_task(client.run())
    words = [f"w{idx}" for idx in range(8)]
    front = Front.make(client, ChatTokenizer.from_vocabulary(words), model_name="fake", tokens=tokens, limits=Limits())
    server = FrontServer(front, listener)
    on_ready(server)
    try:
        return await server.run(engine_run)
    finally:
        await client.close()
        await asyncio.gather(serving, return_exceptions=True)


class FakeServer:
    """A replica served in a thread of this process, whose engine the test can look into."""

    def __init__(self, engine: NotingEngine, target: FakeEngineTarget, folder: Path) -> None:
        self.engine = engine
        self._ready: concurrent.futures.Future[FrontServer] = concurrent.futures.Future()
        self.listener = listen("127.0.0.1", 0)
        self.url = address_of(self.listener, tls=False)

        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            await serve(engine, target, self.listener, DirectoryStore, store=str(folder), on_ready=self._ready.set_result)

        self._thread = threading.Thread(target=lambda: asyncio.run(run()), name="fake-replica", daemon=True)
        self._thread.start()
        self.server = self._ready.result(TIMEOUT_S)

    @property
    def address(self) -> RemoteAddress:
        return RemoteAddress(url=self.url, rollout_token=ROLLOUT_TOKEN, control_token=CONTROL_TOKEN)

    def close(self) -> None:
        """As two signals do: end what is under way."""
        for _ in range(2):
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self.server.stop)
        self._thread.join(TIMEOUT_S)
        self.listener.close()
        assert not self._thread.is_alive(), "the server did not stop"


@contextlib.contextmanager
def fake_server(folder: Path, **options: object) -> Iterator[FakeServer]:
    engine = NotingEngine(**options)  # type: ignore[arg-type]
    server = FakeServer(engine, FakeEngineTarget(engine), folder)
    try:
        yield server
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("store", "ready_file", "rollout_token", "control_token"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--store_token")
    parser.add_argument("--vocab_size", type=int, default=VOCAB_SIZE)
    parser.add_argument("--max_context_tokens", type=int, default=64)
    parser.add_argument("--step_s", type=float, default=0.0)
    parser.add_argument("--owner_pid", type=int, required=True)
    parser.add_argument("--refuse", default=None, help="Say this and end instead of serving.")
    arguments = parser.parse_args()
    end_with_owner(arguments.owner_pid)
    if arguments.refuse is not None:
        sys.exit(arguments.refuse)
    store_token = read_secret(arguments.store_token) if arguments.store_token else None
    engine = NotingEngine(arguments.vocab_size, max_context_tokens=arguments.max_context_tokens)
    engine.step_s = arguments.step_s
    tokens = Tokens(rollout=read_secret(arguments.rollout_token), control=read_secret(arguments.control_token))

    def tell(server: FrontServer) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, server.stop)
        path = Path(arguments.ready_file)
        report = {"url": address_of(listener, tls=False), "pid": os.getpid(), "engine_pid": os.getpid()}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.rename(path)

    def open_store(address: str) -> Store:
        return HttpStore(address, token=store_token, timeout_s=TIMEOUT_S)

    with listen("127.0.0.1", 0) as listener:
        target = FakeEngineTarget(engine)
        served = serve(engine, target, listener, open_store, store=arguments.store, tokens=tokens, on_ready=tell)
        failure = asyncio.run(served)
    if failure is not None:
        sys.exit(failure)


if __name__ == "__main__":
    main()
