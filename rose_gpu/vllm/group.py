"""WorkerGroup: the StepEngine whose vLLM runs in another process, with one worker per tensor-parallel rank.

On CUDA two engines cannot share a process (one memory allocator, one set of process groups), and ranks are processes anyway. Same
engine, same commands, over a channel: `submit` only sends, so that the caller goes on while the device works. Commands of one step
come from one thread; weights may be read from any. If the process dies, every request it had ends with the error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt64

import rose_gpu
from common.errors import EngineClosedError, RequestRejectedError
from common.serving.engine import EngineInfo, EngineLoad, SampledToken, StepLimits, StepPlan, StepResult
from common.serving.rejection import why_never
from common.serving.stop_strings import Decode, completes_stop_string
from common.serving.wire import decode_completion, decode_plan, decode_result, encode_plan, encode_request
from common.transfer import errors as transfer_errors
from common.transfer.bits import BITS_DTYPES
from common.transfer.staging import StagedUpdate
from common.types import Completion, FinishReason, Request
from rose_gpu.vllm.channel import Channel, ChannelClosedError
from rose_gpu.vllm.environment import remove_shared_memory
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.requests import why_not_on_vllm
from rose_gpu.vllm.update_file import write_update
from rose_gpu.vllm.worker_weights import MAX_SLICE_BYTES, UPDATE_DIR, CommitError, RankUpdate

CLOSE_TIMEOUT_S = 20.0
"""How long the process may take to end before it is killed."""

_ERRORS: dict[str, type[Exception]] = {
    **{cls.__name__: cls for cls in vars(transfer_errors).values() if isinstance(cls, type) and issubclass(cls, Exception)},
    **{cls.__name__: cls for cls in (ValueError, AssertionError, EngineClosedError, CommitError, ModuleNotFoundError)},
}


class _Remote:
    """The process and the channel to it."""

    def __init__(self, options: VllmOptions, version: int) -> None:
        ours, theirs = socket.socketpair()
        root = Path(rose_gpu.__file__).resolve().parents[1]
        search = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(search), "PYTHONSAFEPATH": "1"}
        with theirs:
            command = [sys.executable, "-m", "rose_gpu.vllm.group_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._channel = Channel(ours)
        self._lock = threading.Lock()
        self.hello: dict[str, Any] = {}
        try:
            self._send({"options": dataclasses.asdict(options), "version": version})
            self.hello, _ = self._receive()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, method: str, **fields: Any) -> None:
        with self._lock:
            self._send({"method": method, "answer": False, **fields})

    def ask(self, method: str, payload: bytes = b"", **fields: Any) -> tuple[dict[str, Any], memoryview]:
        with self._lock:
            self._send({"method": method, "answer": True, **fields}, payload)
            return self._receive()

    def close(self) -> None:
        """Also while another thread waits for an answer: a process that gives none within CLOSE_TIMEOUT_S is killed."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        if self._lock.acquire(timeout=CLOSE_TIMEOUT_S):
            with contextlib.suppress(EngineClosedError):
                self._send({"method": "close", "answer": False})
            self._channel.close()
            self._lock.release()
        try:
            self._process.wait(max(deadline_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        remove_shared_memory(self.hello.get("shared_memory"))

    def _send(self, fields: dict[str, Any], payload: bytes = b"") -> None:
        try:
            self._channel.send(fields, payload)
        except ChannelClosedError as error:
            raise self._gone(error) from error

    def _receive(self) -> tuple[dict[str, Any], memoryview]:
        try:
            fields, payload = self._channel.receive()
        except ChannelClosedError as error:
            raise self._gone(error) from error
        if "error" in fields:
            raise _ERRORS.get(fields["error"], RuntimeError)(f"{fields['text']}\n[worker group] {fields['trace']}")
        return fields, payload

    def _gone(self, error: ChannelClosedError) -> EngineClosedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        return EngineClosedError(
            f"the worker group's process {self._process.pid} is gone (exit code {self._process.poll()}): {error}"
        )


class RemoteWeights:
    """The weights of a worker group; see rose_gpu.vllm.target.EngineWeights."""

    def __init__(self, remote: _Remote, dtype: str) -> None:
        self._remote, self._dtype = remote, BITS_DTYPES[dtype]
        self._specs = {name: (tuple(shape), dtype) for name, (shape, dtype) in remote.hello["specs"].items()}

    def specs(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        return self._specs

    def read(self, name: str, positions: UInt64[np.ndarray, "n"]) -> Shaped[np.ndarray, "n"]:
        _, bits = self._remote.ask("read", positions.astype(np.uint64).tobytes(), name=name)
        return np.frombuffer(bits, self._dtype)

    def call_ranks(self, method: str, *args: Any) -> list[Any]:
        """See rose_gpu.vllm.rank_subscriber.Ranks."""
        return self._remote.ask("ranks", call=method, args=args)[0]["answers"]


@dataclasses.dataclass
class _Live:
    request: Request
    tokens: list[SampledToken] = dataclasses.field(default_factory=list)


class WorkerGroup:
    """See the module, VllmEngine and common.serving.engine.StepEngine."""

    def __init__(self, options: VllmOptions, *, version: int = 0, decode: Decode | None = None) -> None:
        self.options = options
        self._decode = decode
        self._info = options.info()
        self._remote = _Remote(options, version)
        self.weights = RemoteWeights(self._remote, options.arriving_dtype)
        self._live: dict[str, _Live] = {}
        self._load = EngineLoad(
            running_requests=0,
            waiting_requests=0,
            used_cache_tokens=0,
            capacity_cache_tokens=options.num_blocks * options.block_tokens,
            weight_version=version,
        )
        self._num_added_in_flight = 0
        self._in_flight: StepPlan | None = None
        self._lost: list[Completion] = []
        self._committing = False
        self._closed: str | None = None
        self._released = False

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def pid(self) -> int:
        """Of the process that runs the engine."""
        return self._remote.pid

    def load(self) -> EngineLoad:
        """With a step in flight: as it was before it, and what was added since."""
        if self._in_flight is None and self._closed is None:
            with self._watched():
                self._load = EngineLoad(**self._remote.ask("load")[0])
                self._num_added_in_flight = 0
        return dataclasses.replace(self._load, waiting_requests=self._load.waiting_requests + self._num_added_in_flight)

    def add(self, request: Request) -> None:
        self._check_open()
        problem = why_never(request, self._info) or why_not_on_vllm(request, self._live, can_decode=self._decode is not None)
        if problem is not None:
            raise RequestRejectedError(f"request {request.request_id}: {problem}")
        without_strings = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop_strings=()))
        encoded = encode_request(without_strings)  # first: one that cannot be sent leaves nothing behind
        self._live[request.request_id] = _Live(request)
        self._num_added_in_flight += self._in_flight is not None
        with self._watched():
            self._remote.tell("add", request=encoded)

    def abort(self, request_id: str) -> None:
        self._check_open()
        with self._watched():
            self._remote.tell("abort", request_id=request_id)

    def preempt(self, request_id: str, *, keep_cache: bool) -> None:
        self._check_idle("preempt")
        with self._watched():
            self._remote.tell("preempt", request_id=request_id, keep_cache=keep_cache)

    def plan(self, limits: StepLimits) -> StepPlan | None:
        self._check_idle("plan")
        with self._watched():
            answer, _ = self._remote.ask("plan", max_tokens=limits.max_tokens)
            self._load, self._num_added_in_flight = EngineLoad(**answer["load"]), 0
            return None if answer["plan"] is None else decode_plan(answer["plan"])
        return StepPlan(step_id=0, prefill=(), decode=())  # what was lost is waiting to be collected

    def submit(self, plan: StepPlan) -> None:
        self._check_idle("submit")
        with self._watched():
            self._remote.tell("submit", plan=encode_plan(plan))
        self._in_flight = plan

    def collect(self) -> StepResult:
        assert self._in_flight is not None or self._lost, "collect without a submitted step"
        result = self._collect(drain=False)
        assert result is not None
        return result

    def drain(self) -> StepResult | None:
        self._check_open()
        return self._collect(drain=True)

    def commit(self, weights: StagedUpdate | RankUpdate, *, version: int) -> None:
        for _ in self.commit_in_slices(weights, version=version):
            pass

    def commit_in_slices(
        self, weights: StagedUpdate | RankUpdate, *, version: int, max_slice_bytes: int = MAX_SLICE_BYTES
    ) -> Iterator[None]:
        """See VllmEngine.commit_in_slices."""
        self._check_idle("commit")
        self._committing = True
        finished = False
        try:
            with _as_fields(weights) as fields:
                answer, _ = self._remote.ask("commit_open", version=version, max_slice_bytes=max_slice_bytes, **fields)
                while not answer["done"]:
                    yield
                    answer, _ = self._remote.ask("commit_next")
            finished = True
        finally:
            self._committing = False
            if not finished:
                with contextlib.suppress(EngineClosedError):
                    self._remote.ask("commit_close")

    def close(self) -> None:
        if not self._released:  # a failed engine is closed to requests, and still holds its process
            self._released = True
            self._closed = "was closed; make a new one"
            self._live.clear()
            self._lost.clear()
            self._remote.close()

    def _collect(self, *, drain: bool) -> StepResult | None:
        plan, self._in_flight = self._in_flight, None
        self._num_added_in_flight = 0
        result: StepResult | None = None
        with self._watched():
            text = self._remote.ask("collect", drain=drain)[0]["result"]
            result = None if text is None else self._noted(decode_result(text))
        if self._lost:
            lost, self._lost = tuple(self._lost), []
            return StepResult(step_id=plan.step_id if plan else 0, tokens=(), completions=lost, device_s=0.0)
        return result

    def _noted(self, result: StepResult) -> StepResult:
        """Keep what was streamed, and end requests whose stop strings are complete: only this side can decode."""
        stopped: list[Completion] = []
        ended = {completion.request_id for completion in result.completions}
        for token in result.tokens:
            live = self._live[token.request_id]
            live.tokens.append(token)
            if live.request.sampling.stop_strings and token.request_id not in ended:
                stopped += self._stop_if_complete(live)
        completions = (*(self._reason_checked(completion) for completion in result.completions), *stopped)
        for completion in completions:
            self._live.pop(completion.request_id, None)
        return dataclasses.replace(result, completions=completions)

    def _stop_if_complete(self, live: _Live) -> list[Completion]:
        stops, error = self._completes(live)
        if not stops and error is None:
            return []
        answer, _ = self._remote.ask("stop", request_id=live.request.request_id, error=error)
        return [decode_completion(answer["completion"])]

    def _reason_checked(self, completion: Completion) -> Completion:
        """A last token may both reach max_tokens and complete a stop string: then it stopped."""
        live = self._live.get(completion.request_id)
        if live is None or completion.finish_reason is not FinishReason.LENGTH or not live.request.sampling.stop_strings:
            return completion
        stops, error = self._completes(live)
        if error is not None:
            return dataclasses.replace(completion, finish_reason=FinishReason.ERROR, error=error)
        return dataclasses.replace(completion, finish_reason=FinishReason.STOP) if stops else completion

    def _completes(self, live: _Live) -> tuple[bool, str | None]:
        """Whether the newest token completes a stop string, or why that cannot be told."""
        assert self._decode is not None
        token_ids = [token.token_id for token in live.tokens]
        try:
            return completes_stop_string(token_ids, live.request.sampling.stop_strings, self._decode), None
        except Exception as failure:  # the caller's function: its failure is this request's alone
            return False, f"decoding the tokens to look for stop strings failed: {failure!r}"

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """If the process is gone, all requests it had are lost, each with a completion that says so."""
        try:
            yield
        except EngineClosedError as error:
            self._closed = f"failed ({error}); make a new one"
            lost, self._live = self._live, {}
            self._lost += [_lost_completion(live, str(error)) for live in lost.values()]
            if not self._lost:
                raise

    def _check_open(self) -> None:
        if self._closed is not None and not self._lost:
            raise EngineClosedError(f"engine {self._info.name!r} {self._closed}")

    def _check_idle(self, action: str) -> None:
        self._check_open()
        assert self._in_flight is None, f"{action} with a step in flight; collect or drain first"
        assert not self._committing, f"{action} in the middle of a commit; exhaust or close its iterator first"


@contextlib.contextmanager
def _as_fields(weights: StagedUpdate | RankUpdate) -> Iterator[dict[str, Any]]:
    """An update as a command carries it: what the ranks have staged themselves by its numbers, anything else as a file."""
    if isinstance(weights, RankUpdate):
        yield {"staged": dataclasses.asdict(weights)}
        return
    with tempfile.NamedTemporaryFile(dir=UPDATE_DIR if UPDATE_DIR.is_dir() else None, prefix="rose_update_") as file:
        write_update(weights, Path(file.name))
        yield {"path": file.name}


def _lost_completion(live: _Live, error: str) -> Completion:
    return Completion(
        request_id=live.request.request_id,
        token_ids=tuple(token.token_id for token in live.tokens),
        behavior_logprobs=tuple(token.behavior_logprob for token in live.tokens),
        weight_versions=tuple(token.weight_version for token in live.tokens),
        finish_reason=FinishReason.ERROR,
        error=f"request {live.request.request_id}: {error}",
    )
