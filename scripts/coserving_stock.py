"""The baseline of one stock vLLM engine for both kinds of requests: one model, its own priority scheduling, nothing of ours.

It looks like a replica to the front's channel. Online requests have the higher priority; that is all the protection they get.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.serving.engine import EngineInfo, EngineLoad, SampledToken, StepResult
from common.serving.loop import QUIET_PASSES, LoopCounters
from common.serving.replica import ReplicaLoad
from common.types import Completion, FinishReason, Request
from scripts.serving_vllm import BLOCK_TOKENS, SETTINGS

CACHE_BYTES = 256 * 2**20


class StockReplica:
    """Use as `async with`. `on_rollout_step` is called with (seconds, rollout tokens) of every step."""

    def __init__(self, folder: Path, *, vocab_size: int, max_slots: int, max_context_tokens: int, max_step_tokens: int) -> None:
        import os

        os.environ.update(SETTINGS)
        from vllm import EngineArgs, LLMEngine

        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                dtype="float32",
                enforce_eager=True,
                max_model_len=max_context_tokens,
                max_num_seqs=max_slots,
                max_num_batched_tokens=max_step_tokens,
                block_size=BLOCK_TOKENS,
                kv_cache_memory_bytes=CACHE_BYTES,
                scheduling_policy="priority",
                skip_tokenizer_init=True,
                disable_log_stats=True,
            )
        )
        self.info = EngineInfo(name="vllm-stock", vocab_size=vocab_size, max_slots=max_slots, max_context_tokens=max_context_tokens)
        self.counters = LoopCounters()
        self.on_rollout_step: Callable[[float, int], None] = lambda _seconds, _tokens: None
        self._on_step: Callable[[StepResult], None] = lambda _result: None
        self._futures: dict[str, tuple[Request, asyncio.Future[Completion], list[int]]] = {}
        self._num_added = 0
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> StockReplica:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def watch_steps(self, on_step: Callable[[StepResult], None]) -> None:
        self._on_step = on_step

    def load(self) -> ReplicaLoad:
        engine = EngineLoad(
            running_requests=len(self._futures),
            waiting_requests=0,
            used_cache_tokens=0,
            capacity_cache_tokens=0,
            weight_version=0,
        )
        return ReplicaLoad(replica_id="stock", weight_version=0, draining=False, engine=engine)

    async def generate(self, request: Request) -> Completion:
        """As Replica.generate; a higher `request.priority` is vLLM's lower number."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=1.0,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = str(self._num_added)
        self._num_added += 1
        self._engine.add_request(name, {"prompt_token_ids": list(request.prompt_token_ids)}, params, priority=-request.priority)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._futures[name] = (request, future, [])
        self._arrived.set()
        try:
            return await future
        except asyncio.CancelledError:
            if self._futures.pop(name, None) is not None:
                self._engine.abort_request([name])
            raise

    async def _run(self) -> None:
        while True:
            for _ in range(QUIET_PASSES):
                await asyncio.sleep(0)
            if not self._futures:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            started_s = time.perf_counter()
            outputs = self._engine.step()
            self._deliver(outputs, time.perf_counter() - started_s)

    def _deliver(self, outputs: list[Any], duration_s: float) -> None:
        tokens: list[SampledToken] = []
        ended: list[tuple[asyncio.Future[Completion], Completion]] = []
        rollout_tokens = 0
        for output in outputs:
            held = self._futures.get(output.request_id)
            if held is None:
                continue
            request, future, token_ids = held
            new = list(output.outputs[0].token_ids)
            token_ids += new
            if request.priority == 0:
                rollout_tokens += len(new)
            else:
                tokens += [
                    SampledToken(request_id=request.request_id, token_id=token_id, behavior_logprob=0.0, weight_version=0)
                    for token_id in new
                ]
            if output.finished:
                del self._futures[output.request_id]
                ended.append((future, _completion(request, token_ids)))
        self.counters.num_steps += 1
        self.counters.sampled_tokens += len(tokens) + rollout_tokens
        self.counters.device_s += duration_s
        self.on_rollout_step(duration_s, rollout_tokens)
        self._on_step(StepResult(step_id=self.counters.num_steps, tokens=tuple(tokens), completions=(), device_s=duration_s))
        for future, completion in ended:
            if not future.done():
                future.set_result(completion)


def _completion(request: Request, token_ids: list[int]) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=tuple(token_ids),
        behavior_logprobs=(0.0,) * len(token_ids),
        weight_versions=(0,) * len(token_ids),
        finish_reason=FinishReason.LENGTH,
    )
