"""A whole front over a fake engine, in a thread of its own: real sockets, real HTTP, the real channel to the engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import http.client
import json
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from common.rollout.chat import ChatTokenizer
from common.serving.engine import StepLimits, StepPlan
from common.serving.fake import FakeEngine
from common.serving.fake_model import make_weights
from common.serving.front.access import Tokens
from common.serving.front.channel import Channel
from common.serving.front.engine_client import EngineClient
from common.serving.front.engine_server import EngineServer
from common.serving.front.front import Front, Limits
from common.serving.front.server import FrontServer, allow_many_connections, listen
from common.serving.replica import LocalReplica
from common.transfer.publisher import Publisher
from common.transfer.secrets import Secret
from common.transfer.staging import StagedUpdate
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from common.types import Completion, Request
from tests.common.rollout.fakes import write_chatml_folder

MODEL = "fake-model"
ROLLOUT_TOKEN, CONTROL_TOKEN = "rollout-token-of-tests", "control-token-of-tests"
TOKENS = Tokens(rollout=Secret(ROLLOUT_TOKEN.encode(), "test"), control=Secret(CONTROL_TOKEN.encode(), "test"))
TIMEOUT_S = 60.0


@functools.cache
def chatml() -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return ChatTokenizer.load(write_chatml_folder(Path(folder)))


class SlowEngine(FakeEngine):
    """A fake engine whose steps take time, and which fails when told to."""

    step_s = 0.0
    fault: str | None = None

    def submit(self, plan: StepPlan) -> None:
        time.sleep(self.step_s)
        if self.fault is not None:
            raise RuntimeError(self.fault)
        super().submit(plan)


class FakeTarget(NumpyTarget):
    """Applies an update to numpy arrays and commits them to the engine."""

    def __init__(self, engine: FakeEngine, vocab_size: int) -> None:
        self.arrays = {name: value * 0 for name, value in make_weights(0, vocab_size).items()}
        self._engine = engine
        super().__init__(self.arrays)

    def apply(self, update: StagedUpdate) -> None:
        super().apply(update)
        self._engine.commit(self.arrays, version=update.version)


def publish(store: DirectoryStore | MemoryStore, version: int) -> None:
    with contextlib.closing(Publisher(store)) as publisher:
        publisher.publish(version, make_weights(version, chatml().vocab_size)).result()


def make_engine(**options: Any) -> SlowEngine:
    return SlowEngine(
        make_weights(0, chatml().vocab_size), **({"max_slots": 4, "max_context_tokens": 512, "prefix_reuse": True} | options)
    )


def alone(request: Request) -> Completion:
    """What the engine gives for a request with nothing beside it."""
    engine = make_engine()
    engine.add(request)
    while True:
        plan = engine.plan(StepLimits(max_tokens=1024))
        assert plan is not None
        engine.submit(plan)
        for completion in engine.collect().completions:
            return completion


class RunningFront:
    """A server on a free port of this machine. `http` is a fresh connection to it."""

    def __init__(
        self,
        *,
        tokens: Tokens = TOKENS,
        limits: Limits | None = None,
        step_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
        **engine: Any,
    ) -> None:
        self.engine = make_engine(**engine)
        self.engine.step_s = step_s
        self._tokens, self._limits, self._tls = tokens, limits or Limits(), tls
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.outcome: str | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="front", daemon=True)
        self._thread.start()
        self._ready.result(TIMEOUT_S)

    async def _run(self) -> None:
        allow_many_connections()
        self._loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        serving = asyncio.create_task(self._serve_engine(theirs))
        try:
            client = await EngineClient.connect(await Channel.over(ours))
            engine_run = asyncio.create_task(client.run())
            self.front = Front.make(client, chatml(), model_name=MODEL, tokens=self._tokens, limits=self._limits)
            with listen("127.0.0.1", 0) as listener:
                self.port = listener.getsockname()[1]
                self.server = FrontServer(self.front, listener, tls=self._tls)
                self._ready.set_result(None)
                self.outcome = await self.server.run(engine_run)
            await client.close()
            await asyncio.gather(serving, return_exceptions=True)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    async def _serve_engine(self, end: socket.socket) -> None:
        store = MemoryStore()
        publish(store, 0)
        target = FakeTarget(self.engine, chatml().vocab_size)
        replica = LocalReplica("r", self.engine, Subscriber(store, target, receiver_id="r"), max_step_tokens=256)
        async with replica:
            await replica.stage()
            await replica.commit()
            server = EngineServer(
                await Channel.over(end),
                replica,
                target,
                info=self.engine.info,
                subscribe=lambda address: Subscriber(DirectoryStore(address), target, receiver_id="r"),
            )
            await server.serve()

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    def stop(self) -> None:
        """What a signal does."""
        with contextlib.suppress(RuntimeError):  # it has stopped already
            self._loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def http(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)

    def ask(self, path: str, body: object = None, *, method: str | None = None, token: str | None = None) -> tuple[int, Any]:
        """One call: status and what the JSON of the answer says."""
        status, _, content = self.ask_raw(path, None if body is None else json.dumps(body).encode(), method=method, token=token)
        return status, json.loads(content)

    def ask_raw(
        self, path: str, body: bytes | None, *, method: str | None = None, token: str | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        with contextlib.closing(self.http()) as connection:
            connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Until the server has come to a state; how long that takes is not the test's affair."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not holds():
            assert time.monotonic() < deadline_s, f"still not so after {TIMEOUT_S} s: {self.engine.load()}"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        """No request holds a slot, waits, or keeps cache that it needs."""
        load = self.engine.load()
        return (load.running_requests, load.waiting_requests, load.used_cache_tokens) == (0, 0, 0)


@contextlib.contextmanager
def running_front(**options: Any) -> Iterator[RunningFront]:
    front = RunningFront(**options)
    try:
        yield front
    finally:
        front.stop()
        front.stop()
        front.join()
