"""docs/conformance.md says what the suite is."""

from __future__ import annotations

from pathlib import Path

from tests.conformance.listing import case_of, engine_line, laws
from tests.conformance.registry import ENGINES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "conformance.md"
REMEDY = "run `python -m tests.conformance.listing > docs/conformance.md`"


def test_the_document_lists_every_law_once_and_no_other() -> None:
    listed = [line.removeprefix("- ") for line in DOCUMENT.read_text().splitlines() if line.startswith("- ")]
    assert listed == [sentence for _, sentences in laws() for sentence in sentences], REMEDY


def test_the_document_lists_every_engine_with_what_it_lacks() -> None:
    rows = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| ") and "skipped, and why" not in line]
    assert [row.split()[1] for row in rows] == sorted(ENGINES), REMEDY
    for name, row in zip(sorted(ENGINES), rows, strict=True):
        case = case_of(name)
        assert case is None or row == engine_line(name, case), REMEDY
