"""A front whose device has two models: who calls decides which one answers, and nothing that is sent changes that."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from common.serving.coserving.decision_trace import DecisionTrace
from common.serving.coserving.events import Decision, Event, Side
from common.serving.coserving.executor import CoServingExecutor
from common.serving.coserving.objectives import Objective
from common.serving.coserving.statistics import DeviceStatistics
from common.serving.fake_model import make_weights
from common.serving.front.channel import Channel
from common.serving.front.engine_client import EngineClient
from common.serving.front.engine_server import EngineServer
from common.serving.front.front import POLICY, Front
from common.serving.front.server import FrontServer, listen
from common.serving.front.two_models import serve_two_models
from common.serving.replica import LocalReplica
from common.traffic.log import device_sums
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.types import Request
from tests.common.serving.coserving.schedules import controller
from tests.common.serving.front.running import (
    CONTROL_TOKEN,
    MODEL,
    ROLLOUT_TOKEN,
    FakeTarget,
    RunningFront,
    SlowEngine,
    chatml,
    publish,
)

VERSIONS = {Side.SERVING: 0, Side.ROLLOUT: 3}
OBJECTIVE = Objective(ttft_s=5.0, tpot_s=1.0)


class NotedEngine(SlowEngine):
    """Keeps what it was asked."""

    def add(self, request: Request) -> None:
        self.added = [*getattr(self, "added", []), request]
        super().add(request)


class TwoModelFront(RunningFront):
    """A server over two fake engines of one device. The policy's context is shorter, its weights are version 3."""

    def __init__(self) -> None:
        self.engines: dict[Side, NotedEngine] = {}
        super().__init__()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        pairs = {side: socket.socketpair() for side in Side}
        serving = asyncio.create_task(self._serve_engines({side: pair[1] for side, pair in pairs.items()}))
        try:
            clients = {side: await EngineClient.connect(await Channel.over(pair[0])) for side, pair in pairs.items()}
            runs = [asyncio.create_task(client.run()) for client in clients.values()]
            self.front = Front.make(
                clients[Side.SERVING],
                chatml(),
                model_name=MODEL,
                tokens=self._tokens,
                limits=self._limits,
                rollout_engine=clients[Side.ROLLOUT],
            )
            with listen("127.0.0.1", 0) as listener:
                self.port = listener.getsockname()[1]
                self.server = FrontServer(self.front, listener)
                self._ready.set_result(None)
                self.outcome = await self.server.run(runs[0])
            for client in clients.values():
                await client.close()
            await asyncio.gather(serving, *runs, return_exceptions=True)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    async def _serve_engines(self, ends: dict[Side, socket.socket]) -> None:
        policy = controller(OBJECTIVE)
        statistics = DeviceStatistics(policy)
        trace = DecisionTrace()

        def hear(event: Event, now_s: float, decisions: tuple[Decision, ...]) -> None:
            statistics.listen(event, now_s, decisions)
            trace.listen(event, now_s, decisions)

        executor = CoServingExecutor(policy, serving_model="serving", on_event=hear)
        replicas, servers = {}, {}
        for side, end in ends.items():
            engine = NotedEngine(
                make_weights(0, chatml().vocab_size), max_slots=4, max_context_tokens=512 if side is Side.SERVING else 64
            )
            self.engines[side], store = engine, MemoryStore()
            publish(store, VERSIONS[side])
            target = FakeTarget(engine, chatml().vocab_size)
            subscriber = Subscriber(store, target, receiver_id=str(side))
            replicas[side] = LocalReplica(str(side), engine, subscriber, max_step_tokens=256, drive=executor.drive(side))

            def subscribe(address: str, target: FakeTarget = target) -> Subscriber:
                return Subscriber(DirectoryStore(address), target, receiver_id="elsewhere")

            channel = await Channel.over(end)
            servers[side] = EngineServer(channel, replicas[side], target, info=engine.info, subscribe=subscribe, decisions=trace)
        async with replicas[Side.SERVING], replicas[Side.ROLLOUT], executor:
            for replica in replicas.values():
                await replica.stage()
                await replica.commit()
            await serve_two_models(servers, statistics)


@pytest.fixture(scope="module")
def server() -> Iterator[TwoModelFront]:
    front = TwoModelFront()
    yield front
    front.stop()
    front.stop()
    front.join()


def num_asked(front: TwoModelFront) -> dict[Side, int]:
    return {side: len(getattr(engine, "added", [])) for side, engine in front.engines.items()}


def turn(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "call_id": f"call-{number:04d}",
        "prompt_token_ids": [1, 2, 3],
        "sampling": {"max_tokens": 5},
        "key": {"run_seed": 3, "trajectory_id": number, "turn_idx": 0},
    } | fields


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("token", [None, ROLLOUT_TOKEN, CONTROL_TOKEN])
def test_online_callers_never_reach_the_policy(server: TwoModelFront, path: str, token: str | None) -> None:
    before = num_asked(server)
    prompt = {"prompt": "go"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "go"}]}
    body = {"model": MODEL, "max_tokens": 3, "ignore_eos": True, **prompt}
    status, answer = server.ask(path, body, token=token)
    assert status == 200
    assert answer["system_fingerprint"].endswith("-v0")
    after = num_asked(server)
    assert (after[Side.SERVING], after[Side.ROLLOUT]) == (before[Side.SERVING] + 1, before[Side.ROLLOUT])


def test_no_name_of_a_model_brings_an_online_caller_to_the_policy(server: TwoModelFront) -> None:
    before = num_asked(server)
    for name in (POLICY, "rollout", ""):
        status, _ = server.ask("/v1/completions", {"model": name, "prompt": "go", "max_tokens": 3})
        assert status in (400, 404)
    assert num_asked(server) == before
    assert [model["id"] for model in server.ask("/v1/models")[1]["data"]] == [MODEL]


def test_rollouts_never_reach_the_serving_model(server: TwoModelFront) -> None:
    before = num_asked(server)
    status, answer = server.ask("/rollout/v1/generate", turn(1), token=ROLLOUT_TOKEN)
    assert status == 200
    assert answer["weight_versions"] == [3] * 5
    after = num_asked(server)
    assert (after[Side.SERVING], after[Side.ROLLOUT]) == (before[Side.SERVING], before[Side.ROLLOUT] + 1)


def test_the_context_of_each_interface_is_that_of_its_own_model(server: TwoModelFront) -> None:
    too_long = list(range(1, 9)) * 10  # 80 tokens: above the policy's 64, within the serving model's 512
    assert server.ask("/v1/completions", {"model": MODEL, "prompt": too_long, "max_tokens": 2})[0] == 200
    assert server.ask("/rollout/v1/generate", turn(2, prompt_token_ids=too_long), token=ROLLOUT_TOKEN)[0] == 400
    assert server.ask("/control/v1/status", token=CONTROL_TOKEN)[1]["max_context_tokens"] == 64


def test_weights_and_draining_are_the_policys(server: TwoModelFront, tmp_path: Any) -> None:
    status = server.ask("/control/v1/status", token=CONTROL_TOKEN)[1]
    assert (status["model"], status["load"]["weight_version"]) == (POLICY, 3)
    publish(DirectoryStore(tmp_path), 7)
    staged = server.ask("/control/v1/stage", {"version": 7, "store": str(tmp_path)}, token=CONTROL_TOKEN)
    assert (staged[0], staged[1]["version"]) == (200, 7)
    assert server.ask("/control/v1/commit", {}, token=CONTROL_TOKEN)[1] == {"version": 7}
    assert {side: engine.load().weight_version for side, engine in server.engines.items()} == {Side.SERVING: 0, Side.ROLLOUT: 7}
    assert server.ask("/control/v1/drain", {}, token=CONTROL_TOKEN)[0] == 200
    assert server.ask("/rollout/v1/generate", turn(3), token=ROLLOUT_TOKEN)[0] == 503
    assert server.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 2})[0] == 200
    assert server.ask("/health")[0] == 200
    server.ask("/control/v1/resume", {}, token=CONTROL_TOKEN)
    assert server.ask("/rollout/v1/generate", turn(4), token=ROLLOUT_TOKEN)[0] == 200


def test_the_newest_decisions_come_as_a_trace_for_perfetto(server: TwoModelFront) -> None:
    server.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 4, "ignore_eos": True})
    server.ask("/rollout/v1/generate", turn(6), token=ROLLOUT_TOKEN)
    status, answer = server.ask("/control/v1/decisions?seconds=10", token=CONTROL_TOKEN)
    assert status == 200
    spans = [event for event in answer["traceEvents"] if event["ph"] == "X"]
    assert {"serving", "rollout"} <= {span["name"] for span in spans}
    assert all(span["args"]["why"] for span in spans)
    _, newest = server.ask("/control/v1/decisions?seconds=1e-9", token=CONTROL_TOKEN)
    assert [event for event in newest["traceEvents"] if event["ph"] == "X"] == []
    for seconds in ("0", "11", "nan", "soon"):
        assert server.ask(f"/control/v1/decisions?seconds={seconds}", token=CONTROL_TOKEN)[0] == 400
    assert server.ask("/control/v1/decisions", token=ROLLOUT_TOKEN)[0] == 401


def test_the_metrics_tell_what_the_device_did(server: TwoModelFront) -> None:
    server.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 4, "ignore_eos": True})
    server.ask("/rollout/v1/generate", turn(5), token=ROLLOUT_TOKEN)

    def text() -> str:
        return server.ask_raw("/metrics", None)[2].decode()

    def told() -> bool:
        sums = device_sums(text())
        return sums is not None and sums.num_done["serving"] >= 4 and sums.num_done["rollout"] >= 5

    server.wait_until(told)
    sums = device_sums(text())
    assert sums is not None
    assert sums.level == "open"
    assert sums.rollout_tokens >= 5
    assert sums.device_s["serving"] > 0
    assert sums.device_s["rollout"] > 0
    assert sum(sums.level_s.values()) >= sums.device_s["serving"] + sums.device_s["rollout"]
    assert 'rose_coserving_decisions_total{decision="serve",reason=' in text()
    assert "rose_rollout_weight_version" in text()


def test_an_engine_that_fails_ends_both_interfaces() -> None:
    front = TwoModelFront()
    front.engines[Side.ROLLOUT].fault = "the device is on fire"
    status, answer = front.ask("/rollout/v1/generate", turn(6), token=ROLLOUT_TOKEN)
    assert status == 503
    assert "on fire" in answer["error"]["message"]
    front.join()
    assert front.outcome is not None
