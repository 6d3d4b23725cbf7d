"""scripts.serve as a person starts it: two processes, of which neither outlives the other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.transfer.secrets import client_tls
from rose_jax.jetstream.grpc_proto import SERVICE, HealthCheckRequest, HealthCheckResponse
from scripts.entry import ROOT

START_TIMEOUT_S = 240.0
END_TIMEOUT_S = 60.0
TINY = [
    "--config=configs/frozenlake_cpu.py",
    "--config.model.hidden_size=32",
    "--config.model.num_layers=1",
    "--config.sampler.max_slots=4",
    "--config.sampler.max_context_tokens=128",
    "--config.sampler.max_prefill_tiles=16",
]


class Served:
    """A server process, ready."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.stderr = folder / "stderr"
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "scripts.serve", *TINY, "--port=0", "--nowarm_up", f"--ready_file={ready}", *arguments]
        with self.stderr.open("w") as stderr:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ready.exists():
            assert self.process.poll() is None, self.stderr.read_text()
            assert time.monotonic() < deadline_s, f"not ready: {self.stderr.read_text()}"
            time.sleep(0.05)
        self.report: dict[str, Any] = json.loads(ready.read_text())

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.report["url"] + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=END_TIMEOUT_S) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complete(self, **fields: object) -> tuple[int, Any]:
        body = {"model": self.report["model"], "prompt": "up down", "max_tokens": 5, "temperature": 0}
        return self.ask("/v1/completions", body | fields)

    def engine_is_gone(self) -> None:
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while Path(f"/proc/{self.report['engine_pid']}").exists():
            assert time.monotonic() < deadline_s, "the engine process has outlived its front"
            time.sleep(0.05)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    running = Served(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.kill()
    running.process.wait()
    running.engine_is_gone()


def test_it_says_what_it_serves_and_a_sigterm_ends_both_processes(served: Served) -> None:
    first, again = served.complete(), served.complete()
    assert first[0] == 200
    assert first[1]["choices"] == again[1]["choices"]
    served.process.send_signal(signal.SIGTERM)
    output, _ = served.process.communicate(timeout=END_TIMEOUT_S)
    assert served.process.returncode == 0
    assert "a random model (seed 0) with the words of common.rollout.envs.frozen_lake" in output
    served.engine_is_gone()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
def test_tls_covers_http_and_grpc_and_a_key_that_is_missing_is_one_line(tmp_path: Path) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*make.split(), "-subj", "/CN=test", "-keyout", key, "-out", certificate], check=True, capture_output=True)
    served = Served(tmp_path, f"--tls_certificate={certificate}", f"--tls_key={key}", "--grpc_port=0")
    try:
        with urllib.request.urlopen(
            f"{served.report['url']}/health", context=client_tls(certificate), timeout=END_TIMEOUT_S
        ) as answer:
            assert json.loads(answer.read())["status"] == "ok"
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(f"{served.report['url']}/health", timeout=END_TIMEOUT_S)
        trusted = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(f"127.0.0.1:{served.report['grpc_port']}", trusted) as channel:
            health = channel.unary_unary(
                f"/{SERVICE}/HealthCheck",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )
            assert health(HealthCheckRequest(), timeout=END_TIMEOUT_S).is_live
    finally:
        served.process.terminate()
        served.process.wait(END_TIMEOUT_S)
    command = [sys.executable, "-m", "scripts.serve", *TINY, f"--tls_certificate={certificate}", f"--tls_key={tmp_path}/typo.key"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert (ended.returncode, ended.stderr) == (2, f"serve: {tmp_path}/typo.key: there is no such file\n")


@pytest.mark.slow
def test_a_killed_engine_reaches_client_and_person(served: Served) -> None:
    assert served.complete()[0] == 200
    os.kill(served.report["engine_pid"], signal.SIGKILL)
    assert served.process.wait(END_TIMEOUT_S) == 1
    assert f"the engine process {served.report['engine_pid']} was ended by SIGKILL" in served.stderr.read_text()


@pytest.mark.slow
def test_a_killed_front_takes_its_engine_with_it(served: Served) -> None:
    assert served.complete()[0] == 200
    served.process.kill()
    served.engine_is_gone()


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.serve", *TINY, "--port=0", "--config.sampler.max_context_tokens=100000"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert ended.returncode == 2
    assert "max_position_embeddings" in ended.stderr
    command = [sys.executable, "-m", "scripts.serve", *TINY, "--port=0", f"--model={tmp_path}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert ended.returncode == 2
    assert str(tmp_path) in ended.stderr
