"""How every command starts and ends: flags to a configuration, and one line where a traceback would teach nothing.

A user's mistake (a flag, a configuration, a file, a full disk) ends with one line on stderr that names the thing, the value and the
fix; Ctrl-C and SIGTERM end with how to go on. Whatever else is raised is a bug and keeps its traceback. Invariant: exit status 2
for what was asked wrongly, 1 for what failed on the way, 128 + signal number after a signal.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import linecache
import os
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from common import check_installation
from common.config import Config
from common.errors import EngineClosedError, RoseError

flags.disclaim_key_flags()  # what is defined here is a flag of the script that asked for it, and stands in its --help

ROOT = Path(__file__).resolve().parent.parent
CONFIG_FLAG = "config"

ENVIRONMENT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EIO}
)
"""What an operating system refuses through no fault of the code: no room, no right, no such kind of place."""


class UsageError(ValueError):
    """A command line that asks for something that does not exist."""


def flags_of(module_name: str) -> flags.FlagValues:
    """Where a script defines its flags: those of the process if it is the one that runs, else its own.

    Scripts share names (--config, --out), so one that is only imported, say by a test, must leave the process's flags alone.
    """
    return flags.FLAGS if module_name == "__main__" else flags.FlagValues()


def define_config_flag(flag_values: flags.FlagValues, default: str | None = None) -> flags.FlagHolder[Config]:
    """The --config flag, by which a script takes a configuration file and changes to its fields."""
    return config_flags.DEFINE_config_file(
        CONFIG_FLAG,
        default,
        f"Configuration file: {_known_configs()}, or your own. --config.a.b=value changes a field, for example "
        "--config.optim.lr=1e-4 or --config.seed=1; all fields and what they mean: common/config.py.",
        flag_values=flag_values,
    )


def _known_configs() -> str:
    return ", ".join(sorted(str(path.relative_to(ROOT)) for path in (ROOT / "configs").glob("[!_]*.py")))


def run(main: Callable[[], None], *, required: Sequence[str] = (), after_interrupt: str = "") -> NoReturn:
    """Parse the flags, call `main` and exit.

    Args:
        required: flags that must have a value.
        after_interrupt: said after Ctrl-C or SIGTERM: how to go on.
    """

    signals: list[int] = []

    def on_terminate(number: int, frame: FrameType | None) -> None:
        """End as Ctrl-C does, by whatever handles that now: an event loop puts its own handler there."""
        signals.append(number)
        on_interrupt = signal.getsignal(signal.SIGINT)
        (on_interrupt if callable(on_interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    def guarded(_argv: Sequence[str]) -> None:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every step of a save and a restore at INFO
        try:
            main()
        except KeyboardInterrupt:
            number = signals[0] if signals else signal.SIGINT
            _say(f"stopped by {signal.Signals(number).name}. {after_interrupt}".rstrip())
            _exit_without_waiting(128 + number)
        except Exception as error:
            if not is_users(error):
                raise
            _say(one_line(error))
            _exit_without_waiting(2 if isinstance(error, ValueError) else 1)

    check_installation(__file__)
    signal.signal(signal.SIGTERM, on_terminate)
    app.run(guarded, flags_parser=lambda argv: parse(argv, flags.FLAGS, required=required))
    raise AssertionError("app.run exits")


def _say(message: str) -> None:
    print(f"{Path(sys.argv[0]).stem}: {message}", file=sys.stderr, flush=True)


def _exit_without_waiting(status: int) -> NoReturn:
    """End the process now: all that was opened is closed, and a thread stuck in somebody's code must not hold up Ctrl-C."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_users(error: BaseException) -> bool:
    """Whether the line of an error says all that its reader can use: it was raised on purpose, or the machine refused."""
    if isinstance(error, EngineClosedError):
        return error.__cause__ is None or is_users(error.__cause__)  # what made the engine fail decides
    if isinstance(error, RoseError):
        return True
    if isinstance(error, OSError):
        return error.errno in ENVIRONMENT_ERRNOS
    return isinstance(error, ValueError | FloatingPointError) and _raised_here(error)


def _raised_here(error: BaseException) -> bool:
    """Whether a `raise` of this repository raised it, not a library, in C perhaps, that was called wrongly."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    path = Path(traceback.tb_frame.f_code.co_filename).resolve()
    line = linecache.getline(str(path), traceback.tb_lineno)
    return path.is_relative_to(ROOT) and "site-packages" not in path.parts and line.lstrip().startswith("raise ")


def one_line(error: BaseException) -> str:
    """The text of an error; of the operating system's, what it could not do with which file."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror}; free space or name another folder, then run the command again"
    return " ".join(str(error).split())


def parse(argv: Sequence[str], flag_values: flags.FlagValues, *, required: Sequence[str] = ()) -> list[str]:
    """Set the flags; a mistake in them ends the process with status 2 and one line. Returns argv without the flags."""
    try:
        _check_config_arguments(argv, flag_values)
        rest = flag_values(argv)
        if rest[1:]:
            raise UsageError(f"unknown arguments {' '.join(rest[1:])}; changes to the configuration are written --config.a.b=value")
        for name in required:
            if flag_values[name].value in (None, ""):
                known = f"a configuration file: {_known_configs()}, or your own" if name == CONFIG_FLAG else flag_values[name].help
                raise UsageError(f"--{name} is missing; give it {known}")
    except (UsageError, flags.Error) as error:
        _say(f"{one_line(error)} (--help lists the flags)")
        sys.exit(2)
    return rest


def _config_arguments(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of --config if it is given, and the names of the fields that are changed."""
    path: str | None = None
    fields: list[str] = []
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        name, equals, value = argument.partition("=")
        bare = name.removeprefix("-").removeprefix("-")
        if not name.startswith("-"):
            continue
        if bare == CONFIG_FLAG:
            path = value if equals else following
        elif bare.startswith(f"{CONFIG_FLAG}."):
            fields.append(bare.removeprefix(f"{CONFIG_FLAG}."))
    return path, fields


def config_arguments(flag_values: flags.FlagValues = flags.FLAGS) -> list[str]:
    """The arguments that gave this process its configuration, for another process that needs the same."""
    path = config_flags.get_config_filename(flag_values[CONFIG_FLAG])
    changed = [argument for argument in sys.argv[1:] if argument.startswith(("--config.", "-config."))]
    return [f"--{CONFIG_FLAG}={path}", *changed]


def _check_config_arguments(argv: Sequence[str], flag_values: flags.FlagValues) -> None:
    """Say in this project's words what the flag library would end a run with a traceback for.

    Raises:
        UsageError: the file, its get_config or a field that is changed does not exist.
    """
    if CONFIG_FLAG not in flag_values:
        return
    path, changed = _config_arguments(argv)
    if path is None and flag_values[CONFIG_FLAG].default is not None:
        path = config_flags.get_config_filename(flag_values[CONFIG_FLAG])
    if path is None:
        if changed:
            raise UsageError(
                f"--config.{changed[0]} changes a configuration, but --config is missing; there are {_known_configs()}"
            )
        return  # asked for later, if the script needs one
    if not Path(path).is_file():
        raise UsageError(f"--config={path}: there is no such file; there are {_known_configs()}")
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
        raise UsageError(f"--config={path} defines no get_config(); write `def get_config() -> Config:` as configs/ do")
    config = get_config()
    if not isinstance(config, Config):
        raise UsageError(f"--config={path}: get_config() returned a {type(config).__name__}, not a common.config.Config")
    for name in changed:
        _check_field(config, name)


def _check_field(config: Config, name: str) -> None:
    holder: object = config
    done: list[str] = []
    for part in name.replace("[", ".[").split("."):
        where = ".".join([CONFIG_FLAG, *done]).replace(".[", "[")
        if isinstance(holder, list):
            known = [f"[{idx}]" for idx in range(len(holder))]
            fix = "add to the list in the configuration file"
        elif isinstance(holder, ConfigDict):
            known = sorted(holder)
            fix = f"set it in the configuration file: {where}.{part} = ..."
        elif dataclasses.is_dataclass(holder):
            known = [field.name for field in dataclasses.fields(holder)]
            fix = "see common/config.py"
        else:
            raise UsageError(f"--config.{name}: {where} is a value and has no fields")
        if part not in known:
            close = difflib.get_close_matches(part, known, n=1)
            hint = f"did you mean {close[0]}?" if close else fix
            raise UsageError(f"--config.{name}: {where} has no field {part}, it has {', '.join(known) or 'none'}; {hint}")
        match holder:
            case list():
                holder = holder[int(part[1:-1])]
            case ConfigDict():
                holder = holder[part]
            case _:
                holder = getattr(holder, part)
        done.append(part)
