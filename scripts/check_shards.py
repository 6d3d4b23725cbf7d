"""Whether a learner in two processes feeds replicas that are cut otherwise, bit for bit, while they serve.

    python -m scripts.check_shards --versions=5 --out=shards_live.json        (after `make serve-env`)

Two jax.distributed processes hold one learner on a 2 x 4 mesh of fake devices and publish each what its own devices hold, to one
HTTP store. A vLLM replica of two tensor-parallel ranks, each of which fetches its own part, and a JetStream replica with a tensor
axis of 2 follow through a relay, with a request in flight during every change. After every version all live tensors are compared
with the learner's. --replicas leaves one of them out, --norelay lets both read from the learner's store. Rows: version, replica,
wire_bytes, differing, sampled_under. The exit status is 1 if a tensor differs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import flags

from common.transfer.secrets import read_secret
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from scripts import entry
from scripts.shard_processes import DEVICES_EACH, NUM_PROCESSES, TOKEN_SOURCE

_FLAGS = entry.flags_of(__name__)
_VERSIONS = flags.DEFINE_integer("versions", 5, "Versions to publish.", lower_bound=1, flag_values=_FLAGS)
_REPLICAS = flags.DEFINE_list("replicas", ["vllm", "jetstream"], "Replicas to feed.", flag_values=_FLAGS)
_RELAY = flags.DEFINE_bool("relay", True, "Replicas read from a relay, not from the learner's store.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "JSON file to write the rows to.", flag_values=_FLAGS)

CLOSE_TIMEOUT_S = 60.0
REPLICAS = ("vllm", "jetstream")
Row = dict[str, object]


class Role:
    """One process and the line of JSON that answers each command."""

    def __init__(self, name: str, arguments: Sequence[str], num_devices: int) -> None:
        self.name = name
        devices = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}", "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "scripts.shard_processes", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | devices | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(entry.ROOT)},
        )

    def tell(self, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Row:
        """Wait for the next answer; raises RuntimeError if the process ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with exit code {self._process.wait(CLOSE_TIMEOUT_S)}; see its text above")
        return json.loads(line)

    def end(self) -> None:
        """Tell the process to end, and do not wait: those of one learner end together or not at all."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        self.end()
        for stop in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                stop()
        self._process.wait()


@contextlib.contextmanager
def running(name: str, arguments: Sequence[str], num_devices: int) -> Iterator[Role]:
    role = Role(name, arguments, num_devices)
    try:
        yield role
    finally:
        role.close()


@contextlib.contextmanager
def running_relay(upstream: str) -> Iterator[str]:
    """The address of a relay process that reads from `upstream`; both ask for the same token."""
    secrets_flags = [f"--upstream_token={TOKEN_SOURCE}", f"--token={TOKEN_SOURCE}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.relay", f"--upstream={upstream}", *secrets_flags],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(entry.ROOT)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the relay ended with exit code {process.wait(CLOSE_TIMEOUT_S)}; see its text above")
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.wait(CLOSE_TIMEOUT_S)


def check(folder: Path, *, num_versions: int, replicas: Sequence[str], relay: bool) -> list[Row]:
    """What each replica said after each version."""
    os.environ.setdefault(TOKEN_SOURCE.removeprefix("env:"), secrets.token_hex(16))
    server = StoreServer(MemoryStore(), token=read_secret(TOKEN_SOURCE))
    rows: list[Row] = []
    try:
        with contextlib.ExitStack() as stack:
            coordinator = f"127.0.0.1:{_free_port()}"
            learners = [
                stack.enter_context(running(f"learner {i}", ["learner", str(i), coordinator, server.url], DEVICES_EACH))
                for i in range(NUM_PROCESSES)
            ]
            source = stack.enter_context(running_relay(server.url)) if relay else server.url
            followers = [stack.enter_context(running(name, [name, source], 2)) for name in replicas]
            for role in (*learners, *followers):
                stack.callback(role.end)  # before any of them is waited for
            for follower in followers:
                follower.answer()
            for version in range(1, num_versions + 1):
                truth = str(folder / f"truth-{version}")
                for learner in learners:
                    learner.tell(truth=truth)
                published = [learner.answer() for learner in learners]
                print(f"version {version}: {published[0]}", flush=True)
                for follower in followers:
                    follower.tell(version=version, truth=truth)
                for follower in followers:
                    rows.append({"replica": follower.name, "published_bytes": published[0]["wire_bytes"], **follower.answer()})
                    print(f"  {rows[-1]}", flush=True)
    finally:
        server.close()
    return rows


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> None:
    unknown = sorted(set(_REPLICAS.value) - set(REPLICAS))
    if unknown:
        raise entry.UsageError(f"--replicas={','.join(unknown)} names no replica; use some of {','.join(REPLICAS)}")
    with tempfile.TemporaryDirectory(prefix="rose_shards_") as folder:
        rows = check(Path(folder), num_versions=_VERSIONS.value, replicas=_REPLICAS.value, relay=_RELAY.value)
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    differing = [row for row in rows if row["differing"]]
    print(f"{len(rows) - len(differing)} of {len(rows)} versions arrived bit for bit")
    if differing:
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main)
