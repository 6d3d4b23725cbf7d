"""What one sync of weights costs on a cluster: bytes on every link, and seconds until the last replica has committed.

Encoding, each link, and decoding form a pipeline in which two buckets are under way at a time: a sync takes as long as its slowest
stage, of every other stage the time of two buckets, and the round trips. Where replicas share one machine's cores, decoding takes
what all of them need together. Nothing here measures: rates are arguments, those of rates_at were measured on one core of a server.
Refuses layouts that no cluster has. Not modelled: lost packets, other traffic, and a learner that is slower than its links at
copying weights off its devices.
"""

from __future__ import annotations

import bisect
import dataclasses
import math

from common.transfer.shards import BUCKET_BYTES

WIRE_SHARES = (
    (0.0, 0.0),
    (0.001, 0.0009),
    (0.01, 0.0058),
    (0.03, 0.0143),
    (0.1, 0.036),
    (0.3, 0.0743),
    (0.5, 0.0938),
    (1.0, 0.0938),
)
"""Share of elements that changed -> share of the dense bytes on the wire: bfloat16, each by one code; measured up to a half, linear
in between. Larger steps cost up to twice as much."""
ANCHOR_SHARE = 0.76
"""The same for all values of trained bfloat16 weights, compressed; 1.0 on links too fast to compress for."""
HEADER_SHARE = 0.011
"""Of the bytes on a link: TCP, IP and HTTP around them, in packets of 9000 bytes."""
BUCKETS_UNDER_WAY = 2
"""Encoded, and fetched, at a time: the next stage has nothing to do before these are there."""
EARLY_ROUND_TRIPS, LATE_ROUND_TRIPS = 2, 2
"""Catalogue's news and lease, while the first buckets are still being encoded; first byte of a bucket, manifest. Each waits for the
one before."""
FIRST_WINDOW_BYTES = 90_000
"""What TCP sends before the first acknowledgement (ten packets of 9000 bytes); it doubles with every round trip."""
CUT_THROUGH_BYTES = 256 << 10
"""What a relay or a peer holds before it passes it on."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What travels: a delta between versions of a model, or (density None) an anchor, all of it."""

    num_parameters: int
    density: float | None
    parameter_bytes: int = 2

    @property
    def dense_bytes(self) -> int:
        return self.num_parameters * self.parameter_bytes

    @property
    def wire_bytes(self) -> float:
        return self.dense_bytes * (ANCHOR_SHARE if self.density is None else wire_share(self.density))


def wire_share(density: float) -> float:
    """Bytes on the wire over dense bytes, of an update that changes this share of the elements."""
    if not 0 <= density <= 1:
        raise ValueError(f"density={density} is not a share of the elements; give 0 to 1")
    at = max(bisect.bisect_left(WIRE_SHARES, (density, 0.0)), 1)
    (low, low_share), (high, high_share) = WIRE_SHARES[at - 1 : at + 1]
    return low_share + (high_share - low_share) * (density - low) / (high - low)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds of one core.

    Attributes:
        encode_s: per 10^9 dense bytes, to find, encode and send what changed.
        decode_s: per 10^9 dense bytes, to receive, decode, verify and write it.
        pass_on_s: per 10^9 bytes that a relay or peer sends on.
    """

    encode_s: float
    decode_s: float
    pass_on_s: float = 1.4


def rates_at(density: float | None) -> Rates:
    """Rates of one core of a server for an update of this density, bfloat16, measured at 1 % and 50 % (bench_transfer)."""
    if density is None:
        return Rates(encode_s=3.0, decode_s=1.5)
    if density > 0.2:
        return Rates(encode_s=2.0, decode_s=4.0)
    return Rates(encode_s=0.5 + 25 * density, decode_s=0.1 + 25 * density)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who takes part, and the links between them.

    Attributes:
        learner_hosts: each publishes the boxes its devices own, with `encode_cores` cores, over a link of `host_gbit_s`.
        num_replicas, tensor_parallel, pipeline_parallel: replicas and how each is cut; a rank fetches what it holds.
        num_kv_heads, kv_share: key and value heads, and their projections' share of the parameters: with fewer heads than ranks,
            several ranks fetch the same head.
        slow_gbit_s, slow_rtt_s: of the one link between learner and serving cluster.
        host_gbit_s: of the link of each host (learner, relay, replica) within its own cluster.
        fan_out: replicas that feed each other have so many children each; None: they do not.
        shared_cores: cores of the one machine that relay and all replicas run on; None: each rank has its own.
    """

    learner_hosts: int = 1
    encode_cores: float = 2.0
    num_replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    num_kv_heads: int | None = None
    kv_share: float = 0.0
    slow_gbit_s: float
    slow_rtt_s: float = 0.0
    host_gbit_s: float
    relay: bool = False
    fan_out: int | None = None
    shared_cores: float | None = None

    def __post_init__(self) -> None:
        for name in ("learner_hosts", "encode_cores", "num_replicas", "tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if min(self.slow_gbit_s, self.host_gbit_s) <= 0:
            raise ValueError(f"slow_gbit_s={self.slow_gbit_s} and host_gbit_s={self.host_gbit_s} must be above 0")
        if self.fan_out is not None and (not self.relay or self.fan_out < 1):
            raise ValueError(f"fan_out={self.fan_out} needs a relay and at least one child; leave it out for no peers")

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def fetched_share(self) -> float:
        """What the ranks of a replica fetch together, over the update; more than 1 where ranks share heads."""
        if self.num_kv_heads is None:
            return 1.0
        return 1.0 + self.kv_share * (max(1.0, self.tensor_parallel / self.num_kv_heads) - 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Bytes are those of the busiest link of a kind, headers and all. `stages_s`: seconds of each stage, had it been alone."""

    slow_link_bytes: float
    relay_out_bytes: float
    replica_in_bytes: float
    replica_out_bytes: float
    stages_s: dict[str, float]
    latency_s: float
    seconds: float

    @property
    def limit(self) -> str:
        """The stage that decides."""
        return max(self.stages_s, key=lambda name: self.stages_s[name])


def predict(update: Update, cluster: Cluster, rates: Rates | None = None) -> Prediction:
    """One sync: from the call of publish, weights in host memory, to the last replica's commit."""
    rates = rates or rates_at(update.density)
    wire = update.wire_bytes * (1 + HEADER_SHARE)
    per_replica = wire if cluster.fan_out is not None else wire * cluster.fetched_share
    slow = wire if cluster.relay else per_replica * cluster.num_replicas
    children = cluster.num_replicas if cluster.fan_out is None else min(cluster.fan_out, cluster.num_replicas)
    relay_out = per_replica * children if cluster.relay else 0.0
    peers = cluster.fan_out is not None and cluster.num_replicas > cluster.fan_out
    replica_out = per_replica * min(children, cluster.num_replicas - children) if peers else 0.0

    def on_host_s(num_bytes: float) -> float:
        return num_bytes * 8e-9 / cluster.host_gbit_s

    dense_gb = update.dense_bytes / 1e9
    stages = {
        "encode": dense_gb * rates.encode_s / (cluster.learner_hosts * cluster.encode_cores),
        "slow link": max(slow * 8e-9 / cluster.slow_gbit_s, on_host_s(slow / cluster.learner_hosts)),
        "relay out": on_host_s(relay_out),
        "replica in": on_host_s(per_replica),
        "replica out": on_host_s(replica_out),
        "decode": dense_gb * rates.decode_s / cluster.num_ranks,
    }
    if cluster.shared_cores is not None:
        passed_on_gb = per_replica * cluster.num_replicas / 1e9 if cluster.relay else 0.0
        cpu_s = cluster.num_replicas * dense_gb * rates.decode_s + passed_on_gb * rates.pass_on_s
        stages["decode"] = max(stages["decode"], cpu_s / cluster.shared_cores)
    share_under_way = min(1.0, BUCKETS_UNDER_WAY * BUCKET_BYTES / max(update.dense_bytes, 1))
    latency_s = _latency_s(cluster, slow, stages["encode"] * share_under_way, on_host_s(CUT_THROUGH_BYTES))
    slowest = max(stages.values())
    seconds = slowest + (sum(stages.values()) - slowest) * share_under_way + latency_s
    return Prediction(
        slow_link_bytes=slow,
        relay_out_bytes=relay_out,
        replica_in_bytes=per_replica,
        replica_out_bytes=replica_out,
        stages_s=stages,
        latency_s=latency_s,
        seconds=seconds,
    )


def _latency_s(cluster: Cluster, slow_bytes: float, first_encoded_s: float, hop_s: float) -> float:
    """Round trips over the slow link, those in which TCP finds its speed included, and hops down the tree."""
    rate = cluster.slow_gbit_s / 8e-9
    window = rate * cluster.slow_rtt_s
    first_window = FIRST_WINDOW_BYTES * (1 if cluster.relay else cluster.num_replicas)
    ramp = max(0.0, math.log2(max(min(window, slow_bytes), 1.0) / first_window))
    sent_s = first_window * (2**ramp - 1) / rate  # in those round trips; the link's own time has it already
    early_s = max(0.0, cluster.slow_rtt_s * EARLY_ROUND_TRIPS - first_encoded_s)
    depth = 0
    if cluster.fan_out is not None:
        reached, width = 0, 1
        while reached < cluster.num_replicas:
            width *= cluster.fan_out
            reached, depth = reached + width, depth + 1
    return early_s + cluster.slow_rtt_s * (LATE_ROUND_TRIPS + ramp) - sent_s + hop_s * depth
