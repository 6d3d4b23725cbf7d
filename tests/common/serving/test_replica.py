"""LocalReplica over the fake engine and a real store: versions arrive while requests run, and failures leave what was served."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from common.errors import ReplicaUnavailableError
from common.serving.engine import StaleCache
from common.serving.fake import FakeEngine
from common.serving.fake_model import FakeWeights, make_weights
from common.serving.replica import LocalReplica
from common.transfer.errors import TransferError, VersionGoneError
from common.transfer.publisher import Publisher
from common.transfer.staging import StagedUpdate
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.target import NumpyTarget
from common.types import FinishReason, Request, SamplingKey, SamplingParams

VOCAB_SIZE = 20


class FakeEngineTarget(NumpyTarget):
    """Applies an update to numpy arrays and commits them to the engine they belong to."""

    def __init__(self, engine: FakeEngine) -> None:
        self.arrays = {name: np.zeros_like(value) for name, value in make_weights(0, VOCAB_SIZE).items()}
        self._engine = engine
        super().__init__(self.arrays)

    def apply(self, update: StagedUpdate) -> None:
        super().apply(update)
        self._engine.commit(self.arrays, version=update.version)


class Setup:
    """A store with its publisher, and one replica that follows it."""

    def __init__(self, *, asynchronous: bool = False, stale_cache: StaleCache = StaleCache.KEEP) -> None:
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.engine = FakeEngine(
            make_weights(99, VOCAB_SIZE),
            max_slots=4,
            max_context_tokens=64,
            asynchronous=asynchronous,
            prefix_reuse=True,
            stale_cache=stale_cache,
        )
        self.target = FakeEngineTarget(self.engine)
        subscriber = Subscriber(self.store, self.target, receiver_id="r")
        self.replica = LocalReplica("r", self.engine, subscriber, max_step_tokens=64)

    def publish(self, version: int) -> FakeWeights:
        weights = make_weights(version, VOCAB_SIZE)
        self.publisher.publish(version, weights).result()
        return weights

    async def sync(self) -> int:
        await self.replica.stage()
        return await self.replica.commit()


def request(number: int, *, max_tokens: int = 6) -> Request:
    return Request(
        request_id=f"q{number}",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
    )


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=60))


def test_nothing_is_served_before_the_first_commit() -> None:
    async def work() -> None:
        setup = Setup()
        async with setup.replica as replica:
            with pytest.raises(ReplicaUnavailableError, match="no weights yet"):
                await replica.generate(request(0))
            with pytest.raises(ReplicaUnavailableError, match="nothing to commit"):
                await replica.commit()
            assert replica.load().weight_version is None
            setup.publish(3)
            assert await setup.sync() == 3
            completion = await replica.generate(request(1))
            assert set(completion.weight_versions) == {3}
            assert replica.load().weight_version == 3

    run(work())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stale_cache", list(StaleCache))
def test_a_new_version_aborts_nothing_and_tokens_say_what_they_were_sampled_under(
    asynchronous: bool, stale_cache: StaleCache
) -> None:
    async def work() -> None:
        setup = Setup(asynchronous=asynchronous, stale_cache=stale_cache)
        setup.publish(1)
        async with setup.replica as replica:
            await setup.sync()
            running = [asyncio.create_task(replica.generate(request(number, max_tokens=50))) for number in range(8)]
            await asyncio.sleep(0)
            weights = setup.publish(2)
            await setup.sync()
            assert all(np.array_equal(setup.target.arrays[name], value) for name, value in weights.items())
            completions = await asyncio.gather(*running)
        versions = [completion.weight_versions for completion in completions]
        assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions)
        assert all(list(each) == sorted(each) for each in versions)
        assert {version for each in versions for version in each} == {1, 2}

    run(work())


def test_staging_alone_changes_no_token() -> None:
    async def tokens(stage_in_between: bool) -> list[tuple[int, ...]]:
        setup = Setup()
        setup.publish(1)
        async with setup.replica as replica:
            await setup.sync()
            running = [asyncio.create_task(replica.generate(request(number, max_tokens=40))) for number in range(4)]
            if stage_in_between:
                setup.publish(2)
                report = await replica.stage()
                assert (report.version, report.wire_bytes > 0) == (2, True)
            completions = await asyncio.gather(*running)
            assert {version for completion in completions for version in completion.weight_versions} == {1}
            return [completion.token_ids for completion in completions]

    assert run(tokens(stage_in_between=True)) == run(tokens(stage_in_between=False))


def test_staging_and_committing_twice_equals_once() -> None:
    async def work() -> None:
        setup = Setup()
        setup.publish(1)
        async with setup.replica as replica:
            first, again = await replica.stage(), await replica.stage()
            assert first == again
            assert [await replica.commit(), await replica.commit()] == [1, 1]
            held = await replica.stage()
            assert (held.version, held.wire_bytes) == (1, 0)

    run(work())


def test_a_failed_stage_keeps_the_version_served_and_the_next_one_works() -> None:
    async def work() -> None:
        setup = Setup()
        setup.publish(1)
        async with setup.replica as replica:
            await setup.sync()
            with pytest.raises(VersionGoneError, match="version 7"):
                await replica.stage(7)
            assert await replica.commit() == 1
            assert set((await replica.generate(request(0))).weight_versions) == {1}
            setup.publish(2)
            assert await setup.sync() == 2

    run(work())


def test_a_failed_commit_keeps_the_version_served_and_disturbs_no_request() -> None:
    async def work() -> None:
        setup = Setup()
        setup.publish(1)
        async with setup.replica as replica:
            await setup.sync()
            running = asyncio.create_task(replica.generate(request(0, max_tokens=40)))
            bad = {name: np.full_like(value, np.nan) for name, value in make_weights(2, VOCAB_SIZE).items()}
            setup.publisher.publish(2, bad).result()
            await replica.stage()
            with pytest.raises(ValueError, match="finite"):
                await replica.commit()
            assert replica.load().weight_version == 1
            assert set((await running).weight_versions) == {1}

    run(work())


def test_draining_waits_for_what_is_in_flight_and_refuses_what_comes() -> None:
    async def work() -> None:
        setup = Setup()
        setup.publish(1)
        async with setup.replica as replica:
            await setup.sync()
            running = asyncio.create_task(replica.generate(request(0, max_tokens=30)))
            await asyncio.sleep(0)
            draining = asyncio.create_task(replica.drain())
            await asyncio.sleep(0)
            with pytest.raises(ReplicaUnavailableError, match="draining"):
                await replica.generate(request(1))
            await draining
            assert running.done()
            assert replica.load().draining
            replica.resume()
            assert (await replica.generate(request(1))).finish_reason is FinishReason.LENGTH

    run(work())


def test_a_version_published_by_another_learner_is_taken_whole() -> None:
    async def work() -> None:
        setup = Setup()
        setup.publish(1)
        async with setup.replica as replica:
            await setup.sync()
            setup.publisher.close()
            setup.publisher = Publisher(setup.store)
            weights = setup.publish(5)
            assert await setup.sync() == 5
            assert all(np.array_equal(setup.target.arrays[name], value) for name, value in weights.items())
            assert replica.load().weight_version == 5

    run(work())


def test_transfer_errors_are_ours_to_catch() -> None:
    async def work() -> None:
        setup = Setup()
        async with setup.replica as replica:
            with pytest.raises(TransferError, match="any version"):
                await replica.stage()

    run(work())
