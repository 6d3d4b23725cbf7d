"""Spawned workers never outlive the process that spawned them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARENT = """\
import multiprocessing, os, sys, time
from rose_gpu.vllm.environment import end_with_parent

def work():
    os.environ["VLLM_DIST_IDENT"] = sys.argv[1]
    end_with_parent()
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_ends_with_its_parent_and_takes_its_shared_memory_along(tmp_path: Path, how: signal.Signals) -> None:
    program, ident = tmp_path / "program.py", f"rose_test_{os.getpid()}_{how.name}"
    program.write_text(PARENT)
    left = Path("/dev/shm") / f"{ident}-0"
    left.write_bytes(b"x")
    command = [sys.executable, str(program), ident]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker_pid = int(parent.stdout.readline())
        os.kill(parent.pid, how)
    deadline_s = time.monotonic() + 30.0
    while Path(f"/proc/{worker_pid}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker_pid}").exists(), "the worker still runs"
    assert not left.exists()
