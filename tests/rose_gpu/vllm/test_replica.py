"""VllmReplica with a store in front: versions arrive while requests run, and what was sampled goes on as ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose_gpu.vllm.environment import installed_vllm
from rose_gpu.vllm.worker_weights import MAX_SLICE_BYTES

if installed_vllm() is None:
    pytest.skip("vLLM is not installed: see requirements/serve-cpu.txt", allow_module_level=True)

from common.config import Config
from common.rollout.chat import ChatTokenizer
from common.serving.engine import StaleCache
from common.serving.fake import FakeEngine
from common.serving.fake_model import make_weights
from common.serving.loop import EngineLoop
from common.transfer.publisher import Publisher
from common.transfer.store.memory import MemoryStore
from common.types import Completion, FinishReason, Request
from rose_gpu.replica import VllmReplica
from tests.common.rollout.fakes import FakeSuite, episode, write_chatml_folder
from tests.conformance.driver import make_request, prompt
from tests.rose_gpu.vllm.small_models import SHAPE, tensors

MAX_SLOTS = 16


class Setup:
    """A store with its publisher, and one replica that follows it."""

    def __init__(self, *, stale_cache: StaleCache = StaleCache.DROP, **changes: int) -> None:
        from rose_jax.models.qwen3_config import Qwen3Config

        config = Config()
        config.sampler.max_slots, config.sampler.max_context_tokens = MAX_SLOTS, 256
        config.sampler.stale_cache = stale_cache.value
        fields = Qwen3Config(**{**SHAPE, "tie_word_embeddings": True, **changes}).to_hf()
        self._changes = changes
        self.store = MemoryStore()
        self.publisher = Publisher(self.store)
        self.replica = VllmReplica("r", config, fields, self.store)

    def publish(self, version: int) -> dict[str, Any]:
        weights = tensors(version, "bfloat16", **self._changes)
        self.publisher.publish(version, weights).result()
        return weights

    async def sync(self, version: int) -> None:
        self.publish(version)
        await self.replica.stage()
        assert await self.replica.commit() == version


@pytest.fixture
def closing() -> Iterator[list[Publisher]]:
    publishers: list[Publisher] = []
    yield publishers
    for publisher in publishers:
        publisher.close()


@pytest.mark.parametrize("stale_cache", list(StaleCache))
def test_a_new_version_aborts_none_of_sixteen_requests_in_flight(closing: list[Publisher], stale_cache: StaleCache) -> None:
    setup = Setup(stale_cache=stale_cache)
    closing.append(setup.publisher)

    async def work() -> list[Completion]:
        async with setup.replica as replica:
            await setup.sync(1)
            requests = [make_request(f"r{idx}", prompt(40, idx), trajectory_id=idx, max_tokens=60) for idx in range(MAX_SLOTS)]
            running = [asyncio.create_task(replica.generate(request)) for request in requests]
            while replica.counters.sampled_tokens < 3 * MAX_SLOTS:
                await asyncio.sleep(0)
            await setup.sync(2)
            return await asyncio.gather(*running)

    completions = asyncio.run(work())
    assert all(completion.finish_reason is FinishReason.LENGTH for completion in completions)
    for completion in completions:
        num_old = completion.weight_versions.count(1)
        assert completion.weight_versions == (1,) * num_old + (2,) * (60 - num_old)
        assert 0 < num_old < 60


def test_what_vllm_sampled_goes_into_the_next_turn_id_for_id(closing: list[Publisher], tmp_path: Path) -> None:
    chat = ChatTokenizer.load(write_chatml_folder(tmp_path))
    setup = Setup(vocab_size=chat.vocab_size)
    closing.append(setup.publisher)
    asked: list[tuple[Request, Completion]] = []

    class Noting:
        async def generate(self, request: Request) -> Completion:
            completion = await setup.replica.generate(request)
            asked.append((request, completion))
            return completion

    async def work() -> list[int]:
        async with setup.replica:
            await setup.sync(1)
            return (await episode(FakeSuite(max_turns=4), Noting(), chat, max_tokens=16)).token_ids.tolist()

    whole = asyncio.run(work())
    assert len(asked) == 4
    for request, completion in asked:
        end = len(request.prompt_token_ids)
        assert list(request.prompt_token_ids) == whole[:end]
        assert list(completion.token_ids) == whole[end : end + len(completion.token_ids)]
    sampled = [list(completion.token_ids) for _, completion in asked]
    assert any(chat.encode_text(chat.decode(ids)) != ids for ids in sampled), "the law needs two encodings of one text"
    last, reused = asked[-1][0], asked[-1][1].cached_prompt_tokens
    assert reused > len(last.prompt_token_ids) - 64, "vLLM knows all but the last blocks again, sampled tokens included"


def test_another_engine_steps_between_the_slices_of_a_large_commit(closing: list[Publisher]) -> None:
    setup = Setup(hidden_size=1024, intermediate_size=3072)
    closing.append(setup.publisher)
    setup.publish(1)

    async def work() -> tuple[int, int]:
        other = FakeEngine(make_weights(0, 20), max_slots=4, max_context_tokens=4096)
        async with setup.replica as replica, EngineLoop(other, max_step_tokens=64) as loop:
            await replica.stage()
            running = asyncio.create_task(loop.generate(make_request("other", (1, 2, 3), max_tokens=4000)))
            while loop.counters.num_steps == 0:
                await asyncio.sleep(0)
            before = loop.counters.num_steps
            await replica.commit()
            num_steps = loop.counters.num_steps - before
            running.cancel()
            size = sum(tensor.nbytes for tensor in tensors(1, "bfloat16", **setup._changes).values())
            return num_steps, size

    num_steps, update_bytes = asyncio.run(work())
    assert num_steps >= update_bytes // MAX_SLICE_BYTES >= 4
