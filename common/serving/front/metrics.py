"""What the front measures, in Prometheus' text form: latencies as a client sees them here, and what the engine holds.

Histograms are of calls that ended well; a rollout's call has no first token of its own, since it gets its tokens all at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.serving.coserving.statistics import LEVEL_NAMES
from common.serving.front.access import Interface
from common.serving.front.engine_client import EngineClient

LATENCY_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""From a decode step of a small model to a prompt that waited long."""


class _EngineGauges(Collector):
    """Reads an engine's newest report when it is scraped. `prefix` begins every name."""

    def __init__(self, engine: EngineClient, prefix: str) -> None:
        self._engine, self._prefix = engine, prefix

    def collect(self) -> list[GaugeMetricFamily]:
        load, counters = self._engine.load, self._engine.counters
        engine, version = load.engine, load.weight_version
        values = {
            "engine_up": ("1 while the engine process is there", float(self._engine.failure is None)),
            "draining": ("1 while no new request is taken", float(load.draining)),
            "running_requests": ("Requests that hold a slot", engine.running_requests),
            "waiting_requests": ("Requests that wait for a slot", engine.waiting_requests),
            "cache_used_tokens": ("Key-value cache that requests need", engine.used_cache_tokens),
            "cache_reclaimable_tokens": ("Key-value cache kept for prompts to come", engine.reclaimable_cache_tokens),
            "cache_capacity_tokens": ("Key-value cache there is", engine.capacity_cache_tokens),
            "weight_version": ("Version served; NaN before the first", math.nan if version is None else version),
            "engine_steps": ("Steps since the start", counters.num_steps),
            "engine_device_seconds": ("Device time of all steps", counters.device_s),
        }
        return [GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value) for name, (text, value) in values.items()]


class _CoServingMetrics(Collector):
    """What a device that two models share decided and did, as of its newest report; nothing before the first."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> list[Metric]:
        report = self._engine.device
        if report is None:
            return []
        level = GaugeMetricFamily("rose_coserving_level", "1 for the level of caution now", labels=["level"])
        for name in LEVEL_NAMES.values():
            level.add_metric([name], float(name == report.level))
        parked = GaugeMetricFamily("rose_coserving_parked", "1 while the rollout model is parked", value=float(report.parked))
        error = GaugeMetricFamily(
            "rose_coserving_step_time_error", "90th percentile of |actual / predicted - 1| of step times", labels=["side"]
        )
        for side, value in report.step_time_error.items():
            error.add_metric([side], value)
        decisions = CounterMetricFamily("rose_coserving_decisions", "Decisions by kind and reason", labels=["decision", "reason"])
        for name, count in report.decisions.items():
            kind, _, reason = name.partition(": ")
            decisions.add_metric([kind, reason], count)
        sums: dict[str, tuple[str, str, Mapping[str, float]]] = {
            "level_seconds": ("Time in each level of caution", "level", report.level_s),
            "device_seconds": ("Time of the device by kind of work", "work", report.device_s),
            "work": ("Steps, slices of commits, parkings and activations", "work", report.num_done),
        }
        counters = []
        for name, (text, label, values) in sums.items():
            counters.append(CounterMetricFamily(f"rose_coserving_{name}", text, labels=[label]))
            for key, value in values.items():
                counters[-1].add_metric([key], value)
        return [level, parked, error, decisions, *counters]


class Metrics:
    """All of one server's. `rollout_engine`: that of a second model, if there is one."""

    def __init__(self, engine: EngineClient, rollout_engine: EngineClient | None = None) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineGauges(engine, "rose"))
        if rollout_engine is not None:
            self._registry.register(_EngineGauges(rollout_engine, "rose_rollout"))
            self._registry.register(_CoServingMetrics(engine))
        by_class = ["interface"]
        self.ttft_s = Histogram(
            "rose_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            by_class,
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.tpot_s = Histogram(
            "rose_time_per_output_token_seconds",
            "Mean time between a request's tokens after the first",
            by_class,
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.duration_s = Histogram(
            "rose_request_duration_seconds",
            "From a request's arrival to its end",
            by_class,
            registry=self._registry,
            buckets=LATENCY_BUCKETS_S,
        )
        self.tokens = Counter("rose_tokens", "Tokens of prompts and completions", ["interface", "kind"], registry=self._registry)
        self.requests = Counter("rose_requests", "Calls by how they ended", ["interface", "outcome"], registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def call(self, interface: Interface, *, num_prompt_tokens: int, num_choices: int = 1) -> CallMetrics:
        """The measurements of one call that begins now."""
        return CallMetrics(self, interface, num_prompt_tokens, num_choices)


class CallMetrics:
    """Times one call; `finish` records it."""

    def __init__(self, metrics: Metrics, interface: Interface, num_prompt_tokens: int, num_choices: int) -> None:
        self._metrics, self._interface = metrics, interface.value
        self._num_prompt_tokens, self._num_choices = num_prompt_tokens, num_choices
        self._started_s = time.perf_counter()
        self._first_s = self._last_s = 0.0
        self._num_tokens = 0

    def token(self) -> None:
        """A token has arrived from the engine."""
        self._last_s = time.perf_counter()
        self._first_s = self._first_s or self._last_s
        self._num_tokens += 1

    def finish(self, error: BaseException | None, *, num_cached_tokens: int, num_tokens: int | None = None) -> None:
        """The call has ended, well or with an error; `num_tokens` if they were not counted one by one."""
        metrics, interface = self._metrics, self._interface
        left = isinstance(error, asyncio.CancelledError | GeneratorExit)  # the client has
        metrics.requests.labels(interface, "ok" if error is None else "aborted" if left else "failed").inc()
        metrics.tokens.labels(interface, "prompt").inc(self._num_prompt_tokens)
        metrics.tokens.labels(interface, "cached_prompt").inc(num_cached_tokens)
        metrics.tokens.labels(interface, "completion").inc(self._num_tokens if num_tokens is None else num_tokens)
        if error is not None:
            return
        metrics.duration_s.labels(interface).observe(time.perf_counter() - self._started_s)
        if self._num_tokens:
            metrics.ttft_s.labels(interface).observe(self._first_s - self._started_s)
        num_after_first = self._num_tokens / self._num_choices - 1
        if num_after_first > 0:
            metrics.tpot_s.labels(interface).observe((self._last_s - self._first_s) / num_after_first)
