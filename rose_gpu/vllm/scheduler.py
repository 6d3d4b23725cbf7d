"""PlannedScheduler: vLLM's scheduler carrying out steps that were decided outside it, exactly.

vLLM's bookkeeping (block tables, prefix cache, what workers are told) stays vLLM's; what runs, with how many tokens, and who loses
its cache is the planner's. A running request that a step leaves out keeps its blocks; that is how a preempted request keeps its
cache. Anything that differs from the plan is a bug here, and an assertion fails before the workers see the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Series
from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from rose_gpu.vllm.planner import Held, Prefix, Sequence


class PlannedScheduler(Scheduler):
    """See the module. Also the planner's view of the cache; a request goes by the id it was given inside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[Request]
        self.waiting: Any
        self.block_tokens: int = self.block_size
        self._planned_tokens: dict[str, int] = {}
        self._planned_prefixes: dict[str, tuple[Any, int, int]] = {}

    @property
    def _pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def num_blocks(self) -> int:
        """Blocks that requests can use at all."""
        return self._pool.num_gpu_blocks - 1  # one stays with vLLM

    def num_idle_cached_blocks(self) -> int:
        """Free blocks that hold a prefix somebody may still want."""
        return sum(block.ref_cnt == 0 and block.block_hash is not None for block in self._pool.blocks)

    def held(self, sequence: Sequence) -> Held | None:
        request = self.requests[sequence.internal_id]
        if request.status != RequestStatus.RUNNING:
            return None
        (blocks,) = self.kv_cache_manager.get_blocks(request.request_id).blocks
        only_its = frozenset(block.block_id for block in blocks if block.ref_cnt == 1)
        return Held(request.num_computed_tokens, len(blocks), only_its)

    def prefix(self, sequence: Sequence) -> Prefix:
        found, num_tokens, _ = self.kv_cache_manager.get_computed_blocks(self.requests[sequence.internal_id])
        (blocks,) = found.blocks
        idle = frozenset(block.block_id for block in blocks if block.ref_cnt == 0)
        return Prefix(num_tokens, tuple(block.block_id for block in blocks), idle)

    def give_up_cache(self, sequence: Sequence, *, cache_salt: str) -> None:
        """Free a request's blocks; it waits and is computed again, under `cache_salt`."""
        request = self.requests[sequence.internal_id]
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        self.set_salt(request, cache_salt)

    def set_salt(self, request: Request, cache_salt: str) -> None:
        """Separate what a request may share from what was cached under any other salt. It must hold no cache."""
        if request.cache_salt != cache_salt:
            request.cache_salt = cache_salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def schedule_planned(self, planned: Series[tuple[Sequence, int, int]]) -> Any:
        """vLLM's SchedulerOutput for a step of (request, start, number of tokens) in this order."""
        requests = [self.requests[sequence.internal_id] for sequence, _, _ in planned]
        running = [request for request in requests if request.status == RequestStatus.RUNNING]
        admitted = [request for request in requests if request.status != RequestStatus.RUNNING]
        resting = [request for request in self.running if request not in running]
        waiting = self.waiting
        waiting.remove_requests(admitted)
        self.running, self.waiting = running, create_request_queue(self.policy)
        for request in admitted:
            self.waiting.add_request(request)
        pinned = self._pin_prefixes(admitted)
        self._planned_tokens = {sequence.internal_id: num_tokens for sequence, _, num_tokens in planned}
        output = super().schedule()
        self._pool.free_blocks(pinned)
        assert not self.waiting, "a planned request was not admitted"
        self.running, self.waiting = self.running + resting, waiting
        assert output.num_scheduled_tokens == self._planned_tokens, (output.num_scheduled_tokens, self._planned_tokens)
        for sequence, start, num_tokens in planned:
            computed = self.requests[sequence.internal_id].num_computed_tokens
            assert computed == start + num_tokens, f"{sequence.internal_id}: {computed} tokens, planned {start} + {num_tokens}"
        return output

    def _pin_prefixes(self, admitted: list[Request]) -> list[Any]:
        """Take the cached prefixes first: an allocation for another request of this step could otherwise reuse their blocks."""
        pinned: list[Any] = []
        self._planned_prefixes = {}
        for request in admitted:
            prefix = self.kv_cache_manager.get_computed_blocks(request)
            self._planned_prefixes[request.request_id] = prefix
            (blocks,) = prefix[0].blocks
            self._pool.touch(blocks)
            pinned += blocks
        return pinned

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[Any, int, int, bool]:
        """Called at a request's admission. vLLM enters blocks into the prefix cache as soon as they are scheduled, so that another
        request of the same step would find more than the plan knew of."""
        return (*self._planned_prefixes[request.request_id], False)

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Called for each request with the tokens vLLM would compute; the plan may ask for fewer."""
        planned = self._planned_tokens[request.request_id]
        assert planned <= num_new_tokens, f"{request.request_id}: {planned} tokens planned, {num_new_tokens} possible"
        return planned
