"""The folder of a run: one process at a time, its configuration recorded whole and only when asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.config import Config
from common.workdir import CONFIG_FILE, open_workdir, record_config


def test_a_folder_in_use_is_refused_until_its_user_is_gone(tmp_path: Path) -> None:
    in_use = pytest.raises(ValueError, match=r"run is in use by another process; wait")
    with open_workdir(tmp_path / "run"), in_use, open_workdir(tmp_path / "run"):
        pass
    with open_workdir(tmp_path / "run") as workdir:
        assert workdir == tmp_path / "run"


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from common.workdir import open_workdir\n"
        "with open_workdir(pathlib.Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"locked\n"
    with pytest.raises(ValueError, match="in use"), open_workdir(tmp_path):
        pass
    holder.kill()
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    with open_workdir(tmp_path):
        pass


def test_opening_touches_nothing_that_is_there(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text("what an older run wrote")
    with open_workdir(tmp_path):
        pass
    assert (tmp_path / CONFIG_FILE).read_text() == "what an older run wrote"


@pytest.mark.parametrize("below", ["", "run"])
def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match="taken") as caught, open_workdir(tmp_path / "taken" / below):
        pass
    assert "name a folder you may write to" in str(caught.value)


def test_what_changed_since_the_last_start_is_told_and_the_new_configuration_recorded(tmp_path: Path) -> None:
    config = Config()
    config.env.options.size = 4
    assert record_config(tmp_path, config) == []
    config.optim.lr = 1e-5
    config.env.options.size = 5
    config.env.options.slippery = True
    assert record_config(tmp_path, config) == [
        "env.options.size: 4 -> 5",
        "env.options.slippery: None -> True",
        "optim.lr: 0.0003 -> 1e-05",
    ]
    assert record_config(tmp_path, config) == []
    recorded = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert recorded["optim"]["lr"] == 1e-5
    assert recorded["env"]["options"] == {"size": 5, "slippery": True}
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]


def test_a_recorded_configuration_that_is_not_json_is_named_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"seed": 0')
    with pytest.raises(ValueError, match=r"config\.json is not JSON.*remove it"):
        record_config(tmp_path, Config())
    assert (tmp_path / CONFIG_FILE).read_text() == '{"seed": 0'
