"""The channel between front and engine: tokens and ends arrive once, and either side's death ends the other's requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import SampledToken
from common.serving.front import messages
from common.serving.front.channel import Channel
from common.serving.front.engine_client import Ended, EngineClient
from common.serving.front.engine_server import EngineServer
from common.serving.front.remote_errors import FarProcessError, from_wire, to_wire
from common.serving.replica import LocalReplica
from common.transfer.errors import VersionGoneError
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.types import Completion, FinishReason, Request, SamplingKey, SamplingParams
from tests.common.serving.front.running import FakeTarget, SlowEngine, chatml, make_engine, publish


class Pair:
    """Both ends in one event loop."""

    def __init__(self) -> None:
        self.engine: SlowEngine = make_engine()

    async def __aenter__(self) -> Pair:
        ours, theirs = socket.socketpair()
        self._serving = asyncio.create_task(self._serve(theirs))
        self.client = await EngineClient.connect(await Channel.over(ours))
        self.running = asyncio.create_task(self.client.run())
        return self

    async def _serve(self, end: socket.socket) -> None:
        store = MemoryStore()
        publish(store, 0)
        target = FakeTarget(self.engine, chatml().vocab_size)
        replica = LocalReplica("r", self.engine, Subscriber(store, target, receiver_id="r"), max_step_tokens=64)
        async with replica:
            await replica.stage()
            await replica.commit()
            channel = await Channel.over(end)
            await EngineServer(
                channel, replica, target, info=self.engine.info, subscribe=lambda _: Subscriber(store, target, receiver_id="r")
            ).serve()

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close()
        await asyncio.gather(self._serving, self.running, return_exceptions=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


def request(number: int = 0, *, max_tokens: int = 6, **sampling: Any) -> Request:
    return Request(
        request_id=f"q{number}",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
    )


def test_records_survive_the_wire() -> None:
    asked = request(3, stop_token_ids=(4, 5), stop_strings=("a",), num_top_logprobs=2)
    assert messages.request_from_wire(messages.request_to_wire(asked)) == asked
    answer = Completion(
        request_id="q",
        token_ids=(1,),
        behavior_logprobs=(-0.5,),
        weight_versions=(7,),
        finish_reason=FinishReason.STOP,
        top_logprobs=(((1, -0.5), (2, -1.0)),),
    )
    assert messages.completion_from_wire(messages.completion_to_wire(answer)) == answer


def test_errors_keep_their_class_and_text_and_bugs_their_name() -> None:
    for error in (RequestRejectedError("too long"), VersionGoneError("version 3"), ValueError("a value")):
        again = from_wire(to_wire(error))
        assert (type(again), str(again)) == (type(error), str(error))
    bug = from_wire(to_wire(KeyError("x")))
    assert isinstance(bug, FarProcessError)
    assert "KeyError" in str(bug)


def test_tokens_are_streamed_before_the_one_end_and_make_up_the_completion() -> None:
    async def work() -> None:
        async with Pair() as pair:
            events: list[SampledToken | Ended] = []
            ended = asyncio.Event()

            def on_event(event: SampledToken | Ended) -> None:
                events.append(event)
                if isinstance(event, Ended):
                    ended.set()

            pair.client.start(request(num_top_logprobs=2), on_event, stream=True)
            await ended.wait()
            *tokens, end = events
            assert isinstance(end, Ended)
            assert end.completion is not None
            assert tuple(token.token_id for token in tokens) == end.completion.token_ids
            assert tuple(token.top_logprobs for token in tokens) == end.completion.top_logprobs
            assert pair.client.load.engine.running_requests == 0
            assert pair.client.counters.sampled_tokens == len(tokens)

    run(work())


def test_a_request_keeps_the_id_its_caller_gave_and_ids_need_not_differ() -> None:
    async def work() -> None:
        async with Pair() as pair:
            answers = await asyncio.gather(*(pair.client.generate(request(0)) for _ in range(6)))
            assert {answer.request_id for answer in answers} == {"q0"}
            assert len({answer.token_ids for answer in answers}) == 1

    run(work())


def test_an_aborted_request_frees_its_slot_and_says_nothing_more() -> None:
    async def work() -> None:
        async with Pair() as pair:
            task = asyncio.create_task(pair.client.generate(request(max_tokens=500)))
            while not pair.engine.load().running_requests:
                await asyncio.sleep(0)
            task.cancel()
            while pair.engine.load().running_requests:
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await pair.client.generate(request(1))).finish_reason is FinishReason.LENGTH

    run(work())


def test_a_request_aborted_before_the_engine_saw_it_changes_nothing() -> None:
    async def work() -> None:
        async with Pair() as pair:
            for number in range(20):
                pair.client.abort(pair.client.start(request(number), lambda event: None, stream=True))
            assert (await pair.client.generate(request(1))).finish_reason is FinishReason.LENGTH
            assert pair.engine.load().running_requests == 0

    run(work())


def test_a_refused_request_is_told_why() -> None:
    async def work() -> None:
        async with Pair() as pair:
            with pytest.raises(RequestRejectedError, match="exceed the context"):
                await pair.client.generate(request(max_tokens=5000))

    run(work())


def test_a_failed_engine_ends_every_request_and_call_with_its_own_words() -> None:
    async def work() -> None:
        async with Pair() as pair:
            running = [asyncio.create_task(pair.client.generate(request(number, max_tokens=400))) for number in range(6)]
            while not pair.engine.load().running_requests:
                await asyncio.sleep(0)
            pair.engine.fault = "the device is on fire"
            for ended in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(ended, EngineClosedError)
                assert "the device is on fire" in str(ended)
            assert "the device is on fire" in await pair.running
            with pytest.raises(EngineClosedError, match="on fire"):
                await pair.client.generate(request(9))
            with pytest.raises(EngineClosedError, match="on fire"):
                await pair.client.commit()

    run(work())


def test_when_the_front_is_gone_nothing_of_it_goes_on() -> None:
    async def work() -> None:
        pair = Pair()
        async with pair:
            for number in range(6):
                pair.client.start(request(number, max_tokens=500), lambda event: None, stream=True)
            while not pair.engine.load().running_requests:
                await asyncio.sleep(0)
        load = pair.engine.load()
        assert (load.running_requests, load.waiting_requests) == (0, 0)

    run(work())


def test_a_call_that_fails_raises_over_here_what_it_raised_over_there() -> None:
    async def work() -> None:
        async with Pair() as pair:
            with pytest.raises(VersionGoneError, match="version 7"):
                await pair.client.stage(7, None)
            assert await pair.client.commit() == 0

    run(work())
