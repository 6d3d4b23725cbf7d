"""The relay command, as a process: it serves, refuses what is unsafe in one line, and ends on SIGTERM."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.transfer.publisher import Publisher
from common.transfer.secrets import read_secret
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.http_client import HttpStore
from tests.common.transfer.models import assert_equal_bits, make_model
from tests.common.transfer.test_relay import follow

COMMAND = [sys.executable, "-m", "scripts.relay"]


def test_a_relay_serves_a_folder_keeps_a_cache_and_ends_on_sigterm(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(os.urandom(16).hex())
    publisher, model = Publisher(DirectoryStore(tmp_path / "learner")), make_model()
    publisher.publish(0, model).result(10)
    publisher.close()
    flags = [f"--upstream={tmp_path / 'learner'}", f"--token=file:{token}", f"--cache={tmp_path / 'cache'}", "--fan_out=2"]
    process = subprocess.Popen([*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        store = HttpStore(json.loads(process.stdout.readline())["url"], token=read_secret(f"file:{token}"))
        assert_equal_bits(follow(store, model), model)
        assert store.post("/peer", {"name": "p0", "url": "http://p0:1", "leaving": False, "reports": []}) == {"parent": None}
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert said.strip().endswith("What is in the cache stays for the next start.")
    assert (tmp_path / "cache/v0/anchor/b00000").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--upstream is missing"),
        (["--upstream=/tmp/x", "--host=0.0.0.0"], "without a token"),
        (["--upstream=https://learner:1"], "needs --upstream_ca"),
        (["--upstream=/tmp/x", "--certificate=a.pem"], "go together"),
        (["--upstream=/tmp/x", "--token=0123456789abcdef"], "its value is not given here"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_status_2(flags: list[str], text: str, tmp_path: Path) -> None:
    flags = [flag.replace("/tmp/x", str(tmp_path)) for flag in flags]
    ended = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert text in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
