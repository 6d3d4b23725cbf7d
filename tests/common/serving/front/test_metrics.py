"""Prometheus text: parsed by Prometheus' own parser, and its numbers are what happened."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.common.serving.front.running import MODEL, ROLLOUT_TOKEN, RunningFront, running_front


def samples(front: RunningFront) -> dict[tuple[str, str], float]:
    """Value of each sample by name and interface."""
    status, headers, content = front.ask_raw("/metrics", None)
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    families = text_string_to_metric_families(content.decode())
    kept = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {(sample.name, "/".join(value for _, value in sorted(sample.labels.items()))): sample.value for sample in kept}


def test_metrics_count_what_happened_by_class() -> None:
    with running_front() as front:
        _, answer = front.ask("/v1/completions", {"model": MODEL, "prompt": "go stay", "max_tokens": 7, "n": 2, "ignore_eos": True})
        front.ask("/v1/completions", {"model": MODEL, "prompt": "go", "max_tokens": 100_000})
        turn = {
            "call_id": "call-0001",
            "prompt_token_ids": [1, 2, 3],
            "sampling": {"max_tokens": 5},
            "key": {"run_seed": 3, "trajectory_id": 1, "turn_idx": 0},
        }
        front.ask("/rollout/v1/generate", turn, token=ROLLOUT_TOKEN)
        found = samples(front)
    assert found["rose_tokens_total", "online/completion"] == 14
    assert found["rose_tokens_total", "rollout/completion"] == 5
    assert found["rose_tokens_total", "rollout/prompt"] == 3
    assert found["rose_requests_total", "online/ok"] == 1
    assert found["rose_requests_total", "online/failed"] == 1
    assert found["rose_time_to_first_token_seconds_count", "online"] == 1
    assert found["rose_time_per_output_token_seconds_count", "online"] == 1
    assert 0 < found["rose_time_per_output_token_seconds_sum", "online"] < found["rose_request_duration_seconds_sum", "online"]
    assert found["rose_weight_version", ""] == 0
    assert found["rose_running_requests", ""] == 0
    assert found["rose_cache_capacity_tokens", ""] == 4 * 512
    assert answer["usage"]["completion_tokens"] == 14
