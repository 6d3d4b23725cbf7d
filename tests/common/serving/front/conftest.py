"""One server for all tests of a module that do not stop or stall it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.common.serving.front.running import RunningFront, running_front


@pytest.fixture(scope="module")
def server() -> Iterator[RunningFront]:
    with running_front() as front:
        yield front
