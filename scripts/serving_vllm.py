"""The process in which vLLM serves a benchmark's workloads. It imports no JAX and, before vLLM, nothing that brings TensorFlow."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

from scripts.serving_workload import ClosedLoop, Timing

READY = "ready"
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
CACHE_BYTES = 64 * 2**20
BLOCK_TOKENS = 32  # the CPU backend takes multiples of it


def serve_vllm(pipe: Connection, checkpoint: str, slots: int, max_context_tokens: int) -> None:
    """Answer each ClosedLoop with its timings until None comes."""
    os.environ.update(SETTINGS)
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=checkpoint,
            dtype="float32",
            enforce_eager=True,
            max_model_len=max_context_tokens,
            max_num_seqs=slots,
            block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=CACHE_BYTES,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
    )
    pipe.send(READY)
    num_requests = 0
    while (work := pipe.recv()) is not None:
        timings = run_workload(engine, work, num_requests)
        num_requests += len(timings)
        pipe.send(timings)


def run_workload(engine: Any, work: ClosedLoop, first_id: int) -> list[Timing]:
    """Step the engine until every stream is done."""
    from vllm import SamplingParams

    timings: dict[str, Timing] = {}
    streams: dict[str, int] = {}
    upcoming, num_open = work.start(), 0
    while upcoming or num_open:
        for prompt in upcoming:
            params = SamplingParams(max_tokens=prompt.max_tokens, ignore_eos=True, logprobs=0, temperature=1.0, detokenize=False)
            name, sent_s = str(first_id + len(timings)), time.perf_counter()
            engine.add_request(name, {"prompt_token_ids": list(prompt.token_ids)}, params)
            timings[name], streams[name] = Timing(sent_s=sent_s), prompt.stream_idx
            num_open += 1
        upcoming = []
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            timing = timings[output.request_id]
            timing.first_token_s = timing.first_token_s or now_s
            if output.finished:
                num_open -= 1
                token_ids = list(output.outputs[0].token_ids)
                timing.num_tokens = len(token_ids)
                following = work.answered(streams[output.request_id], token_ids)
                if following is not None:
                    upcoming.append(following)
    return list(timings.values())
