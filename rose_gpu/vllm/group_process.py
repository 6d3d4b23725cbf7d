"""The process of a worker group: builds a VllmEngine and carries out what comes over the channel, one command after the other.

    python -m rose_gpu.vllm.group_process FD     (started by WorkerGroup, never by hand)

It ends when it is told to or when the channel closes, so that it never outlives its owner. A command that fails answers with the
error; one without an answer leaves its error for the next that has one.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common import check_installation
from common.serving.engine import StaleCache, StepLimits
from common.serving.wire import decode_plan, decode_request, encode_completion, encode_plan, encode_result
from rose_gpu.vllm.channel import Channel, ChannelClosedError
from rose_gpu.vllm.engine import VllmEngine
from rose_gpu.vllm.options import VllmOptions
from rose_gpu.vllm.update_file import read_update
from rose_gpu.vllm.worker_weights import RankUpdate

Answer = dict[str, Any]


class GroupServer:
    """Commands by name; each takes its fields and returns the fields of its answer, or None if it has none."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._commit: Iterator[None] | None = None
        self._error: Exception | None = None
        self.commands: dict[str, Callable[[dict[str, Any], memoryview], tuple[Answer, bytes] | None]] = {
            "add": self._add,
            "abort": self._abort,
            "preempt": self._preempt,
            "submit": self._submit,
            "load": lambda fields, payload: (dataclasses.asdict(engine.load()), b""),
            "plan": self._plan,
            "collect": self._collect,
            "stop": self._stop,
            "read": self._read,
            "ranks": lambda fields, payload: ({"answers": engine.weights.call_ranks(fields["call"], *fields["args"])}, b""),
            "commit_open": self._commit_open,
            "commit_next": self._commit_next,
            "commit_close": self._commit_close,
        }

    def serve(self, channel: Channel) -> None:
        """Until the channel closes or "close" comes."""
        while True:
            fields, payload = channel.receive()
            if fields["method"] == "close":
                return
            try:
                answer = self.commands[fields["method"]](fields, payload)
                if answer is not None and self._error is not None:
                    error, self._error = self._error, None
                    raise error
            except Exception as error:
                if fields["answer"]:
                    channel.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc(limit=-3)})
                else:
                    self._error = self._error or error
                continue
            if fields["answer"]:
                assert answer is not None
                channel.send(answer[0], answer[1])

    def _add(self, fields: dict[str, Any], payload: memoryview) -> None:
        self._engine.add(decode_request(fields["request"]))

    def _abort(self, fields: dict[str, Any], payload: memoryview) -> None:
        self._engine.abort(fields["request_id"])

    def _preempt(self, fields: dict[str, Any], payload: memoryview) -> None:
        self._engine.preempt(fields["request_id"], keep_cache=fields["keep_cache"])

    def _submit(self, fields: dict[str, Any], payload: memoryview) -> None:
        self._engine.submit(decode_plan(fields["plan"]))

    def _plan(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        plan = self._engine.plan(StepLimits(max_tokens=fields["max_tokens"]))
        load = dataclasses.asdict(self._engine.load())
        return {"plan": None if plan is None else encode_plan(plan), "load": load}, b""

    def _collect(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        result = self._engine.drain() if fields["drain"] else self._engine.collect()
        return {"result": None if result is None else encode_result(result)}, b""

    def _stop(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        completion = self._engine.stop(fields["request_id"], error=fields["error"])
        return {"completion": encode_completion(completion)}, b""

    def _read(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        bits = self._engine.weights.read(fields["name"], np.frombuffer(payload, np.uint64))
        return {}, bits.tobytes()

    def _commit_open(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        assert self._commit is None, "a commit is under way"
        path = fields.get("path")
        update = RankUpdate(**fields["staged"]) if path is None else read_update(Path(path))
        self._commit = self._engine.commit_in_slices(
            update, version=fields["version"], max_slice_bytes=fields["max_slice_bytes"], path=path
        )
        return self._commit_next(fields, payload)

    def _commit_next(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        assert self._commit is not None, "no commit is under way"
        try:
            next(self._commit)
        except StopIteration:
            self._commit = None
            return {"done": True}, b""
        except BaseException:
            self._commit = None
            raise
        return {"done": False}, b""

    def _commit_close(self, fields: dict[str, Any], payload: memoryview) -> tuple[Answer, bytes]:
        if self._commit is not None:
            self._commit.close()  # type: ignore[attr-defined]
            self._commit = None
        return {}, b""


def main(fd: int) -> None:
    import rose_gpu

    check_installation(rose_gpu.__file__)
    channel = Channel(socket.socket(fileno=fd))
    hello, _ = channel.receive()
    try:
        options = VllmOptions(**hello["options"] | {"stale_cache": StaleCache(hello["options"]["stale_cache"])})
        engine = VllmEngine(options, version=hello["version"])
    except Exception as error:
        channel.send({"error": type(error).__name__, "text": str(error), "trace": traceback.format_exc(limit=-3)})
        return
    try:
        specs = {name: [list(shape), dtype] for name, (shape, dtype) in engine.weights.specs().items()}
        channel.send({"info": dataclasses.asdict(engine.info), "specs": specs, "shared_memory": engine.shared_memory})
        GroupServer(engine).serve(channel)
    except ChannelClosedError:
        pass  # the owner is gone: nobody is left to tell
    finally:
        engine.close()
        channel.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
