"""The list of what the conformance suite holds against which engine, and what it skips and why, as docs/conformance.md.

    python -m tests.conformance.listing > docs/conformance.md

Made from the tests and the registry themselves; a test compares the file with them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.serving.engine import StaleCache
from tests.conformance.registry import ENGINES, SLOW_ENGINES, EngineCase, Feature

FOLDER = Path(__file__).parent
HEAD = """\
# What the conformance suite holds against every engine

Made by `python -m tests.conformance.listing` from the tests themselves. How to run the suite, and how to add an engine:
[tests/conformance/README.md](../tests/conformance/README.md).
"""


def laws() -> Iterator[tuple[str, list[str]]]:
    """For each file of the suite its laws: the names of its tests, in their order, read as sentences."""
    for path in sorted(FOLDER.glob("test_engine_*.py")):
        tests = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        names = [node.name.removeprefix("test_") for node in tests if node.name.startswith("test_")]
        yield path.stem.removeprefix("test_engine_"), [name.replace("_", " ") for name in names]


def case_of(name: str) -> EngineCase | None:
    """None where the engine's library is not installed."""
    try:
        return ENGINES[name]()
    except pytest.skip.Exception:
        return None


def engine_line(name: str, case: EngineCase) -> str:
    """One row of the table: the engine, its policy for stale caches, what it lacks and why."""
    lacks = "; ".join(f"{feature.value}: {reason}" for feature, reason in case.lacks.items()) or "nothing"
    policy = case.stale_cache.value if Feature.PREFIX_REUSE not in case.lacks else "-"
    return f"| {name}{' (slow)' * (name in SLOW_ENGINES)} | {policy} | {lacks} |"


def render() -> str:
    """The whole file. Raises ModuleNotFoundError if an engine's library is not installed."""
    lines = [HEAD, "## Engines", "", "| engine | stale caches | skipped, and why |", "|---|---|---|"]
    for name in sorted(ENGINES):
        case = case_of(name)
        if case is None:
            raise ModuleNotFoundError(f"engine {name!r} cannot be built here; run this where all engines are installed")
        lines.append(engine_line(name, case))
    lines += [
        "",
        f"Besides, laws of one policy for stale caches ({', '.join(StaleCache)}) are skipped where another one is declared, and",
        "engines whose library is not installed, each with that reason. `pytest tests/conformance -rs` shows every single skip.",
    ]
    for title, sentences in laws():
        lines += ["", f"## {title.replace('_', ' ').capitalize()}", "", *(f"- {sentence}" for sentence in sentences)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
