"""Fixtures of the conformance suite: every test runs once per registered engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from common.serving.engine import StaleCache, StepEngine
from tests.conformance.driver import Driver
from tests.conformance.registry import ENGINES, MAX_CONTEXT_TOKENS, MAX_SLOTS, MIN_VOCAB_SIZE, SLOW_ENGINES, EngineCase, Feature

_kept: dict[str, StepEngine[Any]] = {}


@functools.cache
def _build(name: str) -> EngineCase:
    return ENGINES[name]()


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_ENGINES)) for name in sorted(ENGINES)])
def engine_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine_case(engine_name: str) -> EngineCase:
    return _build(engine_name)


@pytest.fixture
def engine(engine_name: str, engine_case: EngineCase) -> Iterator[StepEngine[Any]]:
    """A fresh engine, or one that an earlier test left whole: idle, and without cached state of other weights."""
    engine = _kept.pop(engine_name, None) or engine_case.make()
    assert engine.info.max_slots == MAX_SLOTS
    assert engine.info.max_context_tokens == MAX_CONTEXT_TOKENS
    assert engine.info.vocab_size >= MIN_VOCAB_SIZE
    yield engine
    if not engine_case.reuse:
        engine.close()
        return
    load = engine.load()
    idle = engine.drain() is None and load.running_requests + load.waiting_requests == 0
    keeps_stale = engine_case.stale_cache is StaleCache.KEEP and Feature.PREFIX_REUSE not in engine_case.lacks
    if idle and (load.weight_version == 0 or not keeps_stale):
        engine.commit(engine_case.weights(0), version=0)
        _kept[engine_name] = engine
    else:
        engine.close()


@pytest.fixture
def driver(engine: StepEngine[Any]) -> Driver:
    return Driver(engine)


@pytest.fixture(scope="session", autouse=True)
def _close_kept_engines() -> Iterator[None]:
    yield
    while _kept:
        _kept.popitem()[1].close()
