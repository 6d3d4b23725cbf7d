"""What every Replica promises, held against one in this process and one behind HTTP, both over the fake engine and a real store."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import EngineClosedError, ReplicaUnavailableError, RequestRejectedError
from common.serving.engine import StaleCache
from common.serving.fake_model import FakeWeights, make_weights
from common.serving.remote import RemoteReplica
from common.serving.replica import Replica
from common.transfer.errors import TransferError, VersionGoneError
from common.transfer.publisher import Publisher
from common.transfer.store.directory import DirectoryStore
from common.types import FinishReason, Request, SamplingKey, SamplingParams
from tests.common.serving.fake_replica import VOCAB_SIZE, FakeEngineTarget, FakeServer, NotingEngine, local_replica

STEP_S = 0.003
"""Long enough that a call that follows a request finds it running."""


class Setup:
    """A store with its publisher, and one replica that follows it, not yet entered."""

    def __init__(self, kind: str, folder: Path, **engine: Any) -> None:
        self._kind, self._folder = kind, folder
        self.store = DirectoryStore(folder)
        self.publisher = Publisher(self.store)
        self.engine = NotingEngine(**engine)
        self.engine.step_s = STEP_S if kind == "remote" else 0.0
        self.target = FakeEngineTarget(self.engine)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Replica]:
        if self._kind == "local":
            async with local_replica(self.engine, self.target, self.store) as replica:
                yield replica
            return
        server = await asyncio.to_thread(FakeServer, self.engine, self.target, self._folder)
        try:
            async with RemoteReplica("r", server.address) as remote:
                yield remote
        finally:
            await asyncio.to_thread(server.close)

    def publish(self, version: int) -> FakeWeights:
        weights = make_weights(version, VOCAB_SIZE)
        self.publisher.publish(version, weights).result()
        return weights

    async def until_it_runs(self, num_requests: int) -> None:
        while len(self.engine.requests) < num_requests:
            await asyncio.sleep(0)


async def sync(replica: Replica) -> int:
    await replica.stage()
    return await replica.commit()


@pytest.fixture(params=["local", "remote"])
def set_up(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Setup]]:
    made: list[Setup] = []

    def make(**engine: Any) -> Setup:
        made.append(Setup(request.param, tmp_path / f"store{len(made)}", **engine))
        return made[-1]

    yield make
    for setup in made:
        setup.publisher.close()


def request(number: int, *, max_tokens: int = 6) -> Request:
    return Request(
        request_id=f"q{number}",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


def test_nothing_is_served_before_the_first_commit(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        async with setup.running() as replica:
            with pytest.raises(ReplicaUnavailableError, match="no weights yet"):
                await replica.generate(request(0))
            with pytest.raises(ReplicaUnavailableError, match="nothing to commit"):
                await replica.commit()
            assert replica.load().weight_version is None
            setup.publish(3)
            assert await sync(replica) == 3
            completion = await replica.generate(request(1))
            assert completion.request_id == "q1"
            assert set(completion.weight_versions) == {3}
            assert replica.load().weight_version == 3

    run(work())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stale_cache", list(StaleCache))
def test_a_new_version_aborts_nothing_and_tokens_say_what_they_were_sampled_under(
    set_up: Callable[..., Setup], asynchronous: bool, stale_cache: StaleCache
) -> None:
    async def work() -> None:
        setup = set_up(asynchronous=asynchronous, stale_cache=stale_cache)
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            running = [asyncio.create_task(replica.generate(request(number, max_tokens=50))) for number in range(8)]
            await setup.until_it_runs(8)
            weights = setup.publish(2)
            await sync(replica)
            assert all(np.array_equal(setup.target.arrays[name], value) for name, value in weights.items())
            completions = await asyncio.gather(*running)
        versions = [completion.weight_versions for completion in completions]
        assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions)
        assert all(list(each) == sorted(each) for each in versions)
        assert {version for each in versions for version in each} == {1, 2}

    run(work())


def test_staging_alone_changes_no_token(set_up: Callable[..., Setup]) -> None:
    async def tokens(stage_in_between: bool) -> list[tuple[int, ...]]:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            running = [asyncio.create_task(replica.generate(request(number, max_tokens=40))) for number in range(4)]
            if stage_in_between:
                setup.publish(2)
                report = await replica.stage()
                assert (report.version, report.wire_bytes > 0) == (2, True)
            completions = await asyncio.gather(*running)
            assert {version for completion in completions for version in completion.weight_versions} == {1}
            return [completion.token_ids for completion in completions]

    assert run(tokens(stage_in_between=True)) == run(tokens(stage_in_between=False))


def test_staging_and_committing_twice_equals_once(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            first, again = await replica.stage(), await replica.stage()
            assert first == again
            assert [await replica.commit(), await replica.commit()] == [1, 1]
            held = await replica.stage()
            assert (held.version, held.wire_bytes) == (1, 0)

    run(work())


def test_a_failed_stage_keeps_the_version_served_and_the_next_one_works(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            with pytest.raises(VersionGoneError, match="version 7"):
                await replica.stage(7)
            assert await replica.commit() == 1
            assert set((await replica.generate(request(0))).weight_versions) == {1}
            setup.publish(2)
            assert await sync(replica) == 2

    run(work())


def test_a_failed_commit_keeps_the_version_served_and_disturbs_no_request(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            running = asyncio.create_task(replica.generate(request(0, max_tokens=40)))
            bad = {name: np.full_like(value, np.nan) for name, value in make_weights(2, VOCAB_SIZE).items()}
            setup.publisher.publish(2, bad).result()
            await replica.stage()
            with pytest.raises((ValueError, TransferError), match="finite"):
                await replica.commit()
            assert replica.load().weight_version == 1
            assert set((await running).weight_versions) == {1}

    run(work())


def test_a_store_that_takes_no_confirmation_holds_up_no_request(
    set_up: Callable[..., Setup], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = set_up()
    confirming, may_end = threading.Event(), threading.Event()

    async def work() -> tuple[int, int]:
        async with setup.running() as replica:
            setup.publish(0)
            await sync(replica)
            setup.publish(1)
            await replica.stage()
            monkeypatch.setattr(DirectoryStore, "confirm", lambda *_: (confirming.set(), may_end.wait(30)))
            commit = asyncio.create_task(replica.commit())
            try:
                await asyncio.to_thread(confirming.wait, 30)
                completion = await replica.generate(request(1))
                assert not commit.done()
            finally:
                may_end.set()
            return set(completion.weight_versions).pop(), await commit

    assert run(work()) == (1, 1)


def test_draining_waits_for_what_is_in_flight_and_refuses_what_comes(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            running = asyncio.create_task(replica.generate(request(0, max_tokens=30)))
            await setup.until_it_runs(1)
            await replica.drain()
            assert setup.engine.load().running_requests == 0
            assert (await running).finish_reason is FinishReason.LENGTH
            with pytest.raises(ReplicaUnavailableError, match="draining"):
                await replica.generate(request(1))
            assert replica.load().draining
            await replica.drain()
            await replica.resume()
            assert not replica.load().draining
            assert (await replica.generate(request(1))).finish_reason is FinishReason.LENGTH

    run(work())


def test_a_version_published_by_another_learner_is_taken_whole(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            setup.publisher.close()
            setup.publisher = Publisher(setup.store)
            weights = setup.publish(5)
            assert await sync(replica) == 5
            assert all(np.array_equal(setup.target.arrays[name], value) for name, value in weights.items())
            assert replica.load().weight_version == 5

    run(work())


def test_transfer_errors_are_ours_to_catch(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        async with set_up().running() as replica:
            with pytest.raises(TransferError, match="any version"):
                await replica.stage()

    run(work())


def test_a_request_that_can_never_run_fails_alone(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            good = asyncio.create_task(replica.generate(request(0, max_tokens=30)))
            with pytest.raises(RequestRejectedError, match="64"):
                await replica.generate(request(1, max_tokens=200))
            assert (await good).finish_reason is FinishReason.LENGTH

    run(work())


def test_cancelling_a_call_gives_its_slot_back(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            doomed = [asyncio.create_task(replica.generate(request(number, max_tokens=60))) for number in range(6)]
            await setup.until_it_runs(6)
            for call in doomed:
                call.cancel()
            assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*doomed, return_exceptions=True))
            assert (await replica.generate(request(9))).finish_reason is FinishReason.LENGTH
            while setup.engine.load().running_requests + setup.engine.load().waiting_requests:
                await asyncio.sleep(0.001)

    run(work())


def test_an_engine_that_fails_ends_every_request_with_its_words(set_up: Callable[..., Setup]) -> None:
    async def work() -> None:
        setup = set_up()
        setup.publish(1)
        async with setup.running() as replica:
            await sync(replica)
            calls = [asyncio.create_task(replica.generate(request(number, max_tokens=60))) for number in range(6)]
            await setup.until_it_runs(6)
            setup.engine.fault = "the device fell off the bus"
            for end in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(end, EngineClosedError)
                assert "fell off the bus" in str(end)

    run(work())
