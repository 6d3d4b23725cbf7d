"""How commands start and end: which mistakes get one line, and which errors keep their traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from common.config import Config
from common.errors import CheckpointError, EngineClosedError
from scripts import entry

FROZEN_LAKE = "--config=configs/frozenlake_cpu.py"


def parse(*arguments: str, default: str | None = None, required: tuple[str, ...] = ("config",)) -> Config:
    flag_values = flags.FlagValues()
    holder = entry.define_config_flag(flag_values, default)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["command", *arguments])  # where ml_collections looks for fields to change
        entry.parse(sys.argv, flag_values, required=required)
    return holder.value


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistake in the flags ends with."""
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_fields_are_changed_by_flags_in_every_form() -> None:
    config = parse(FROZEN_LAKE, "--config.optim.lr=0.5", "--config.seed", "7", "--config.model.remat")
    assert (config.optim.lr, config.seed, config.model.remat) == (0.5, 7, True)
    assert parse(default="configs/frozenlake_cpu.py", required=()).num_versions == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--config is missing", "configs/frozenlake_cpu.py"]),
        (["--config="], ["--config"]),
        (["--config=configs/nosuch.py"], ["--config=configs/nosuch.py: there is no such file", "configs/household_cpu.py"]),
        (["--config=configs"], ["--config=configs: there is no such file"]),
        (["--config.optim.lr=1"], ["--config.optim.lr", "--config is missing"]),
        ([FROZEN_LAKE, "--config.optim.lrr=1"], ["config.optim has no field lrr", "did you mean lr?"]),
        (["--config.seed=1", FROZEN_LAKE], ["--config.seed=1", "before a value for --config"]),
        ([FROZEN_LAKE, "--config.zzz=1"], ["config has no field zzz", "common/config.py"]),
        ([FROZEN_LAKE, "--config.seed.more=1"], ["config.seed is a value and has no fields"]),
        ([FROZEN_LAKE, "--config.env.options.nosuch=1"], ["config.env.options has no field nosuch", "in the configuration file"]),
        ([FROZEN_LAKE, "--config.num_versions=many"], ["--config.num_versions=many"]),
        ([FROZEN_LAKE, "--confg=x"], ["confg", "Did you mean"]),
        ([FROZEN_LAKE, "optim.lr=1"], ["unknown arguments optim.lr=1", "--config.a.b=value"]),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_with_the_fix(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    line = complaint(capsys, *arguments)
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x = 1", "defines no get_config()"),
        ("def get_config(): return {'seed': 1}", "get_config() returned a dict, not a common.config.Config"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    assert f"--config={path}" in complaint(capsys, f"--config={path}")
    assert words in complaint(capsys, f"--config={path}")


def test_an_error_inside_a_configuration_file_keeps_its_traceback(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def get_config(): return nosuchname")
    with pytest.raises(NameError):
        parse(f"--config={path}")


def test_importing_a_script_leaves_the_flags_of_the_process_alone() -> None:
    assert entry.flags_of("__main__") is flags.FLAGS
    assert entry.flags_of("scripts.train") is not flags.FLAGS


def caught(raising: str) -> BaseException:
    """The error of a statement that stands, as far as Python can tell, outside the repository."""
    try:
        exec(raising, {"np": np})
    except Exception as error:
        return error
    raise AssertionError(raising)


def raised_here(error: Exception, cause: BaseException | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


def test_what_was_raised_on_purpose_is_the_users_and_what_broke_is_ours() -> None:
    bug = caught("{}['x']")
    assert entry.is_users(raised_here(ValueError("seed=-1 must not be negative")))
    assert entry.is_users(raised_here(CheckpointError("folder is missing")))
    assert entry.is_users(raised_here(FloatingPointError("loss=nan")))
    assert entry.is_users(raised_here(OSError(28, "No space left on device", "/x")))
    assert entry.is_users(raised_here(EngineClosedError("stopped")))
    assert entry.is_users(raised_here(EngineClosedError("failed"), raised_here(ValueError("max_step_tokens=2"))))
    assert not entry.is_users(raised_here(EngineClosedError("failed"), bug))
    assert not entry.is_users(bug)
    assert not entry.is_users(raised_here(OSError(2, "No such file or directory", "/x")))
    assert not entry.is_users(raised_here(AssertionError("two steps in flight")))


def test_a_value_error_of_a_library_that_was_called_wrongly_is_ours() -> None:
    assert not entry.is_users(caught("int('x')"))
    with pytest.raises(ValueError, match="broadcast") as in_c:
        np.zeros(2) + np.zeros(3)
    assert not entry.is_users(in_c.value)  # the last line of Python is in this repository, but it is no `raise`


def test_an_operating_systems_refusal_names_the_file() -> None:
    assert entry.one_line(OSError(28, "No space left on device", "/runs/x")).startswith("/runs/x: No space left on device; ")
    assert entry.one_line(ValueError("two\n  lines")) == "two lines"


def run_command(body: str, *, signal_after_ready: int | None = None) -> tuple[int, str, str]:
    """Status and output of a process whose main is `body`; the signal is sent when it has printed a line."""
    main = textwrap.indent(textwrap.dedent(body), "    ")
    code = (
        f"import asyncio, sys, time\nfrom scripts import entry\ndef main():\n{main}\nentry.run(main, after_interrupt='Go on so.')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # children of a shell's background job ignore it
    )
    if signal_after_ready is not None:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal_after_ready)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_exit_status_and_output_tell_success_mistake_failure_and_bug_apart(tmp_path: Path) -> None:
    assert run_command("print('done')") == (0, "done\n", "")
    failing = tmp_path / "failing.py"
    failing.write_text("from common.errors import RolloutError\ndef fail(): raise RolloutError('episodes keep failing')")
    body = f"sys.path.insert(0, {str(tmp_path)!r})\nimport failing\nfailing.fail()"
    assert run_command(body) == (1, "", "-c: episodes keep failing\n")
    status, _, err = run_command("from common.config import Config, validate\nvalidate(Config(seed=-1))")
    assert (status, err) == (2, "-c: config.seed=-1 must not be negative\n")
    status, _, err = run_command("{}['x']")
    assert status == 1
    assert "Traceback" in err


@pytest.mark.parametrize(("number", "name"), [(2, "SIGINT"), (15, "SIGTERM")])
@pytest.mark.parametrize("waits_in", ["asyncio.run(asyncio.sleep(60))", "time.sleep(60)"])
def test_a_signal_closes_what_is_open_and_says_how_to_go_on(number: int, name: str, waits_in: str) -> None:
    body = f"""
        try:
            print('ready', flush=True)
            {waits_in}
        finally:
            print('closed', flush=True)
    """
    assert run_command(body, signal_after_ready=number) == (128 + number, "closed\n", f"-c: stopped by {name}. Go on so.\n")
