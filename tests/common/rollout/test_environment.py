"""A user's own environment plugs in as module:Class, and every way to mistype it is named."""

import re
import textwrap
from pathlib import Path

import pytest

from common.rollout.chat import ChatTokenizer
from common.rollout.environment import Demonstrator, load_task_suite
from common.types import Split
from tests.common.rollout.fakes import CountingEnvironment

PLUGIN = """
    from tests.common.rollout.fakes import FakeSuite

    not_a_class = FakeSuite()

    class MazeSuite(FakeSuite):
        def __init__(self, doors: int = 2) -> None:
            super().__init__(num_tasks=doors)
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maze_plugin.py").write_text(textwrap.dedent(PLUGIN))
    (tmp_path / "maze_broken.py").write_text("import a_library_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_users_suite_is_built_with_the_options_of_the_config() -> None:
    suite = load_task_suite("maze_plugin:MazeSuite", {"doors": 5})
    assert suite.num_tasks(Split.TRAIN) == 5
    assert not isinstance(suite.make_environment(), Demonstrator)
    assert isinstance(suite.make_environment(), CountingEnvironment)
    ChatTokenizer.from_vocabulary(suite.vocabulary())


def test_frozen_lake_is_found_by_the_name_in_the_default_config() -> None:
    suite = load_task_suite("common.rollout.envs.frozen_lake:FrozenLakeSuite", {"size": 5, "slippery": True})
    assert isinstance(suite.make_environment(), Demonstrator)


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("maze_plugin.MazeSuite", {}, "must have the form module:Class"),
        (":MazeSuite", {}, "must have the form module:Class"),
        ("maze_plugin:", {}, "must have the form module:Class"),
        ("maze_plugins:MazeSuite", {}, "cannot import 'maze_plugins'"),
        ("maze_broken:MazeSuite", {}, "cannot import 'a_library_nobody_has'"),
        ("maze_plugin:MazeSuit", {}, "maze_plugin has no class 'MazeSuit'"),
        ("maze_plugin:not_a_class", {}, "has no class 'not_a_class'"),
        ("maze_plugin:MazeSuite", {"door": 5}, "'door'; it takes (doors)"),
    ],
)
def test_a_mistaken_factory_or_option_is_named(factory: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_task_suite(factory, options)
    assert factory in str(caught.value)
