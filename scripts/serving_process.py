"""ServingProcess: a replica process started for a measurement, and plain clients of it."""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.entry import ROOT

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
TIMEOUT_S = 120.0
"""Of one call."""


class ServingProcess:
    """Use as a context manager: inside it the server takes calls, after it both its processes are gone.

    `environment` is added to this process's own.
    """

    def __init__(
        self, arguments: Sequence[str], *, python: str = sys.executable, environment: Mapping[str, str] | None = None
    ) -> None:
        self._arguments, self._python, self._environment = list(arguments), python, dict(environment or {})
        self.rollout_token, self.control_token = secrets.token_hex(16), secrets.token_hex(16)

    def __enter__(self) -> ServingProcess:
        with tempfile.TemporaryDirectory(prefix="rose_serving_") as folder:
            ready = Path(folder) / "ready.json"
            variables = {"ROSE_ROLLOUT_TOKEN": self.rollout_token, "ROSE_CONTROL_TOKEN": self.control_token}
            flags = ["--port=0", "--rollout_token=env:ROSE_ROLLOUT_TOKEN", "--control_token=env:ROSE_CONTROL_TOKEN"]
            self._process = subprocess.Popen(
                [self._python, "-m", "scripts.serve", *self._arguments, *flags, f"--ready_file={ready}"],
                cwd=ROOT,
                env=os.environ | self._environment | variables,
            )
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not ready.exists():
                if self._process.poll() is not None:
                    raise ValueError(f"the server ended with status {self._process.returncode}; what it said stands above")
                if time.monotonic() > deadline_s:
                    self._process.kill()
                    raise ValueError(f"the server was not ready after {START_TIMEOUT_S:g} s")
                time.sleep(0.1)
            self.report: dict[str, Any] = json.loads(ready.read_text())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def url(self) -> str:
        return str(self.report["url"])

    @property
    def address(self) -> tuple[str, int]:
        parsed = urllib.parse.urlsplit(self.url)
        assert parsed.hostname is not None
        assert parsed.port is not None
        return parsed.hostname, parsed.port

    @property
    def model(self) -> str:
        return str(self.report["model"])

    @property
    def pids(self) -> dict[str, int]:
        return {"front": self.report["pid"], "engine": self.report["engine_pid"]}

    def ask(self, path: str, body: object = None, *, token: str | None = None) -> Any:
        """The answer of one call, which must succeed."""
        connection = http.client.HTTPConnection(*self.address, timeout=TIMEOUT_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"{path} was answered with {response.status}: {content.decode(errors='replace')[:500]}")
        return json.loads(content)

    def status(self) -> dict[str, Any]:
        """What the engine holds, without asking it."""
        return self.ask("/control/v1/status", token=self.control_token)

    def step_ends_s(self) -> list[float]:
        """When the newest engine steps ended, on this machine's monotonic clock."""
        return [end_s for end_s, _, _ in self.ask("/control/v1/step_times", token=self.control_token)["steps"]]


@dataclasses.dataclass
class Streamed:
    """One streamed completion as its client saw it."""

    sent_s: float
    arrivals_s: list[float] = dataclasses.field(default_factory=list)
    text: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, len(self.arrivals_s) - 1)


def request_bytes(path: str, body: bytes, token: str | None = None) -> bytes:
    """A POST of JSON on a connection of its own, as it goes over the wire."""
    fields = ["Host: x", "Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    fields += [f"Authorization: Bearer {token}"] if token else []
    return "\r\n".join([f"POST {path} HTTP/1.1", *fields, "", ""]).encode() + body


async def post(
    address: tuple[str, int], path: str, body: bytes, token: str | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, int]:
    """Send one request over a connection of its own; returns it with the answer's status, its head read."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(request_bytes(path, body, token))
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
    except BaseException:
        writer.close()
        raise
    return reader, writer, status


async def stream_completion(address: tuple[str, int], body: dict[str, Any]) -> Streamed:
    """Run a streamed completion to its end, noting when each event came.

    Raises:
        ValueError: it was refused, or ended with an error.
    """
    streamed = Streamed(sent_s=time.monotonic())
    payload = json.dumps({"stream": True, **body}).encode()
    reader, writer, status = await post(address, "/v1/completions", payload)
    try:
        if status != 200:
            raise ValueError(f"a completion was answered with {status}: {(await reader.read(2000)).decode(errors='replace')}")
        lines = []
        async for line in reader:
            if line.startswith(b"data: "):
                streamed.arrivals_s.append(time.monotonic())
                lines.append(line)
    finally:
        writer.close()
    if not lines or lines.pop().strip() != b"data: [DONE]":
        raise ValueError("a stream ended without [DONE]")
    streamed.arrivals_s.pop()
    for line in lines:  # after the measurement
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise ValueError(f"a stream ended with {event['error']}")
        streamed.text += "".join(choice["text"] for choice in event["choices"])
    return streamed


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
