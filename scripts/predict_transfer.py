"""What the cost model predicts for large models: seconds of one sync from 1 to 200 Gbit/s, beside what others have published.

    python -m scripts.predict_transfer --out=predicted.json [--density=0.01]

Rows: model, gbit_s of the link between the clusters, wire_gb, seconds with a relay and with replicas that feed each other, the
stage that limits it, and seconds of the same update and of all values, sent to every replica without either. These are predictions,
not measurements; bench_transfer holds the same function against measured syncs of a small model.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from common.transfer.cost_model import Cluster, Update, predict
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_DENSITY = flags.DEFINE_float("density", 0.01, "Share of elements that change.", 0.0, 1.0, flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows", "published"} to.', flag_values=_FLAGS)

GBIT_S = (1.0, 10.0, 20.0, 50.0, 100.0, 200.0)
HOST_GBIT_S = 200.0
RTT_S = 0.02
FAN_OUT = 2
PUBLISHED = (
    {
        "system": "ROSE",
        "model": "32B",
        "gbit_s": 200,
        "seconds": 21,
        "what": "sparse, shard-aware, by a relay; from secondary notes",
    },
    {"system": "ROSE", "model": "32B", "gbit_s": 20, "seconds": 20, "what": "the same, by another note: less than this"},
    {"system": "ROSE", "model": "any", "gbit_s": None, "seconds": 145, "what": "one full transfer across clusters, at most"},
    {"system": "checkpoint-engine", "model": "1T", "gbit_s": None, "seconds": 16, "what": "dense, RDMA within one cluster"},
    {"system": "TransferEngine", "model": "1T", "gbit_s": None, "seconds": 1.3, "what": "dense, RDMA within one cluster"},
    {"system": "TRL", "model": "72B", "gbit_s": None, "seconds": 12.5, "what": "2.1-2.6 % changed; dense takes 28.5 s"},
)
"""Figures of others, as read; machines and links differ."""
Row = dict[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, the learner's hosts of eight devices, and how a replica is cut."""

    name: str
    num_parameters: int
    learner_hosts: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    num_replicas: int = 16
    num_kv_heads: int = 8
    kv_share: float = 0.02


SETUPS = (
    Setup(name="8B", num_parameters=8_200_000_000, learner_hosts=1, tensor_parallel=1),
    Setup(name="32B", num_parameters=32_800_000_000, learner_hosts=4, tensor_parallel=4),
    Setup(name="235B", num_parameters=235_000_000_000, learner_hosts=32, tensor_parallel=8, num_kv_heads=4, kv_share=0.002),
    Setup(name="1T", num_parameters=1_000_000_000_000, learner_hosts=64, tensor_parallel=16, pipeline_parallel=2, kv_share=0.002),
)


def cluster_of(setup: Setup, gbit_s: float, *, peers: bool) -> Cluster:
    return Cluster(
        learner_hosts=setup.learner_hosts,
        num_replicas=setup.num_replicas,
        tensor_parallel=setup.tensor_parallel,
        pipeline_parallel=setup.pipeline_parallel,
        num_kv_heads=setup.num_kv_heads,
        kv_share=setup.kv_share,
        slow_gbit_s=gbit_s,
        slow_rtt_s=RTT_S,
        host_gbit_s=HOST_GBIT_S,
        relay=peers,
        fan_out=FAN_OUT if peers else None,
    )


def row_of(setup: Setup, gbit_s: float, density: float) -> Row:
    delta = Update(num_parameters=setup.num_parameters, density=density)
    ours = predict(delta, cluster_of(setup, gbit_s, peers=True))
    direct = predict(delta, cluster_of(setup, gbit_s, peers=False))
    full = predict(dataclasses.replace(delta, density=None), cluster_of(setup, gbit_s, peers=False))
    return {
        "model": setup.name,
        "gbit_s": gbit_s,
        "wire_gb": delta.wire_bytes / 1e9,
        "seconds": ours.seconds,
        "limit": ours.limit,
        "seconds_direct": direct.seconds,
        "seconds_full_direct": full.seconds,
    }


def rows(density: float) -> list[Row]:
    return [row_of(setup, gbit_s, density) for setup in SETUPS for gbit_s in GBIT_S]


def main() -> None:
    found = rows(_DENSITY.value)
    print(f"predicted, {_DENSITY.value:.1%} of the elements changed, 16 replicas, hosts at {HOST_GBIT_S:g} Gbit/s")
    print(f"{'model':>6} {'Gbit/s':>7} {'wire GB':>8} {'relay+peers s':>14} {'limit':>10} {'direct s':>9} {'all, direct s':>14}")
    for row in found:
        print(
            f"{row['model']:>6} {row['gbit_s']:>7g} {row['wire_gb']:>8.2f} {row['seconds']:>14.1f} {row['limit']:>10}"
            f" {row['seconds_direct']:>9.1f} {row['seconds_full_direct']:>14.1f}"
        )
    print("\npublished by others (other machines, other links)")
    for published in PUBLISHED:
        rate = "" if published["gbit_s"] is None else f" at {published['gbit_s']} Gbit/s"
        print(f"  {published['system']}, {published['model']}{rate}: {published['seconds']} s ({published['what']})")
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps({"rows": found, "published": PUBLISHED}, indent=1) + "\n")


if __name__ == "__main__":
    entry.run(main)
