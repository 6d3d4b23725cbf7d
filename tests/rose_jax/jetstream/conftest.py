"""What several test files watch."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """One entry per program that XLA compiles during the test."""
    seen: list[str] = []

    def listen(event: str, _duration_s: float, **_: object) -> None:
        if event == COMPILE_EVENT:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
