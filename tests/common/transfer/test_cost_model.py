"""The cost model: what must hold of any prediction, and simple cases counted by hand."""

import dataclasses
import math

import pytest

from common.transfer.cost_model import HEADER_SHARE, WIRE_SHARES, Cluster, Rates, Update, predict, rates_at, wire_share

FREE = Rates(encode_s=0.0, decode_s=0.0, pass_on_s=0.0)
DELTA = Update(num_parameters=1_000_000_000, density=0.01)
WIRE = 2e9 * 0.0058 * (1 + HEADER_SHARE)


def cluster(**changes: object) -> Cluster:
    return Cluster(**({"slow_gbit_s": 1.0, "host_gbit_s": 1e6, "num_replicas": 16} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("fan_out", "relay_out", "replica_out"), [(None, 16, 0), (2, 2, 2), (4, 4, 4), (16, 16, 0), (12, 12, 4)])
def test_with_a_relay_the_slow_link_carries_the_update_once(fan_out: int | None, relay_out: int, replica_out: int) -> None:
    found = predict(DELTA, cluster(relay=True, fan_out=fan_out), FREE)
    assert found.slow_link_bytes == pytest.approx(WIRE)
    assert found.relay_out_bytes == pytest.approx(relay_out * WIRE)
    assert found.replica_out_bytes == pytest.approx(replica_out * WIRE)
    assert found.replica_in_bytes == pytest.approx(WIRE)


def test_without_one_it_carries_it_for_every_replica() -> None:
    found = predict(DELTA, cluster(), FREE)
    assert found.slow_link_bytes == pytest.approx(16 * WIRE)
    assert found.limit == "slow link"
    assert found.seconds == pytest.approx(16 * WIRE * 8e-9, rel=0.01)


def test_more_ranks_than_heads_fetch_some_heads_twice_and_more_ranks_decode_faster() -> None:
    one = cluster(num_replicas=1, relay=True)
    shared = dataclasses.replace(one, tensor_parallel=16, num_kv_heads=8, kv_share=0.05)
    assert shared.fetched_share == pytest.approx(1.05)
    assert predict(DELTA, shared).replica_in_bytes == pytest.approx(1.05 * predict(DELTA, one).replica_in_bytes)
    assert predict(DELTA, shared).slow_link_bytes == predict(DELTA, one).slow_link_bytes
    assert predict(DELTA, shared).stages_s["decode"] == pytest.approx(predict(DELTA, one).stages_s["decode"] / 16)
    assert dataclasses.replace(shared, pipeline_parallel=4).num_ranks == 64


def test_seconds_never_fall_with_more_work_or_less_machine() -> None:
    base = cluster(relay=True, fan_out=2, slow_rtt_s=0.02, host_gbit_s=10.0, learner_hosts=4)
    seconds = predict(DELTA, base).seconds
    for worse in (
        dataclasses.replace(base, slow_gbit_s=0.05),
        dataclasses.replace(base, slow_rtt_s=0.2),
        dataclasses.replace(base, host_gbit_s=0.5),
        dataclasses.replace(base, learner_hosts=1),
        dataclasses.replace(base, num_replicas=64),
        dataclasses.replace(base, fan_out=None),
        dataclasses.replace(base, relay=False, fan_out=None),
        dataclasses.replace(base, shared_cores=2.0),
    ):
        assert predict(DELTA, worse).seconds > seconds
    for density in (0.03, 0.5, None):
        assert predict(dataclasses.replace(DELTA, density=density), base).seconds > seconds
    assert all(predict(DELTA, base).seconds >= stage_s for stage_s in predict(DELTA, base).stages_s.values())


def test_what_waits_while_the_first_buckets_are_encoded_costs_nothing() -> None:
    far = cluster(slow_rtt_s=0.02)
    assert predict(DELTA, far, FREE).latency_s - predict(DELTA, far).latency_s == pytest.approx(2 * 0.02)
    assert predict(DELTA, cluster(slow_rtt_s=0.0), FREE).latency_s == pytest.approx(0.0)


def test_the_share_on_the_wire_grows_with_the_density_and_meets_the_measured_points() -> None:
    shares = [wire_share(density / 1000) for density in range(1001)]
    assert shares == sorted(shares)
    assert [wire_share(density) for density, _ in WIRE_SHARES] == pytest.approx([share for _, share in WIRE_SHARES])
    assert rates_at(0.5).encode_s > rates_at(0.01).encode_s
    with pytest.raises(ValueError, match=r"density=1\.5"):
        wire_share(1.5)


@pytest.mark.parametrize(
    "changes", [{"num_replicas": 0}, {"slow_gbit_s": 0.0}, {"fan_out": 2}, {"relay": True, "fan_out": 0}, {"tensor_parallel": 0}]
)
def test_clusters_that_cannot_be_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be|needs"):
        cluster(**changes)


def test_an_update_of_two_buckets_cannot_overlap_its_stages() -> None:
    small = Update(num_parameters=1_000_000, density=0.5)
    rates = dataclasses.replace(FREE, encode_s=100.0, decode_s=50.0)
    found = predict(small, cluster(num_replicas=1), rates)
    assert found.seconds == pytest.approx(sum(found.stages_s.values()))
    assert math.isclose(found.latency_s, 0.0, abs_tol=1e-9)
