"""EngineProcess over commands that misbehave: whatever an engine says or leaves behind, its front goes on and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from pathlib import Path

import pytest

from common.errors import EngineClosedError
from scripts import engine_process
from scripts.engine_process import EngineProcess

PATIENCE_S = 60.0


def start_and_lose(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What is told of an engine process that runs `code` instead of an engine, after the front has left it."""
    (folder / "scripts").mkdir()
    (folder / "scripts" / "serve.py").write_text(textwrap.dedent(code))
    monkeypatch.setattr(engine_process, "ROOT", folder)

    async def work() -> str:
        with pytest.raises(EngineClosedError) as lost:
            async with EngineProcess(arguments) as process:
                await process.connect()
        return str(lost.value)

    return asyncio.run(asyncio.wait_for(work(), PATIENCE_S))


def test_a_line_without_end_stops_neither_the_engine_nor_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
        import sys
        sys.stderr.write("x" * 1_000_000 + "\\n")
        sys.stderr.write("no such device: tpu7\\n")
        sys.stderr.write("the end")
        sys.exit(3)
    """
    told = start_and_lose(code, tmp_path, monkeypatch)
    assert "ended with status 3; it last said:" in told
    assert told.endswith("x\nno such device: tpu7\nthe end")


def test_what_a_killed_engine_leaves_running_does_not_hold_up_the_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker_pid"
    code = f"""
        import os, signal, subprocess
        left = subprocess.Popen(["sleep", "600"])
        with open({str(worker)!r}, "w") as file:
            file.write(str(left.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    try:
        assert "was ended by SIGKILL" in start_and_lose(code, tmp_path, monkeypatch)
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)


def test_an_engine_knows_who_started_it_whatever_its_front_was_told_of_its_own_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
        import sys
        print([argument for argument in sys.argv if argument.startswith("--owner_pid")][-1], file=sys.stderr)
        sys.exit(1)
    """
    assert start_and_lose(code, tmp_path, monkeypatch, "--owner_pid=1").endswith(f"--owner_pid={os.getpid()}")
