"""Whether replicas end whole and up to date when the learner, the relay or a replica is killed in mid-transfer.

One learner, one relay (scripts.relay, cache on disk) and replicas that feed each other, each a process. For every kill a version is
published, a victim is drawn and gets SIGKILL at a random moment of the transfer; what the others hold then must be a whole version,
the old or the new one, bit for bit; the victim is started again, and all must hold the new version without further help. A kill
that comes after the last commit does not count and is repeated.

    python -m scripts.check_transfer --kills=100 --out=kills.json

Rows: victim, after_s, held (versions at the kill), seconds (until all hold the new one). The exit status is 1 if anything was torn.
"""

from __future__ import annotations

import collections
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from absl import flags

from scripts import entry
from scripts.transfer_kills import LEARNER, RELAY, KillableCluster

_FLAGS = entry.flags_of(__name__)
_KILLS = flags.DEFINE_integer("kills", 100, "Kills that hit a transfer.", lower_bound=1, flag_values=_FLAGS)
_REPLICAS = flags.DEFINE_integer("replicas", 4, "Replicas.", lower_bound=1, flag_values=_FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Of victims and moments.", lower_bound=0, flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, 'JSON file to write {"rows", "summary"} to.', flag_values=_FLAGS)

CATCH_UP_S = 120.0
"""More than any restart on a busy machine; a replica that is not there then has stopped following."""
PEER = "peer"
Row = dict[str, object]


def kill_once(cluster: KillableCluster, version: int, victim: str, transfer_s: float, rng: np.random.Generator) -> Row:
    """Publish `version`, kill, look, restart, wait. A learner that starts again publishes the version once more."""
    cluster.publish(version)
    after_s = float(rng.uniform(0, transfer_s))
    time.sleep(after_s)
    name = victim if victim != PEER else str(rng.choice(cluster.replica_names))
    cluster.kill(name)
    held = cluster.versions()
    cluster.torn += [f"{who} holds version {got} at the kill" for who, got in held.items() if got not in (version - 1, version)]
    cluster.start(name)
    if name == LEARNER:
        cluster.publish(version)
    seconds = cluster.wait_for(version, CATCH_UP_S)
    hit = any(got != version for got in held.values())
    return {"victim": victim, "after_s": after_s, "held": sorted(held.values()), "hit": hit, "seconds": seconds}  # type: ignore[type-var]


def check(folder: Path, *, num_kills: int, num_replicas: int, seed: int) -> tuple[list[Row], list[str]]:
    """The rows of all kills that hit a transfer, and what was torn (nothing, if all is well)."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    with KillableCluster(folder, num_replicas) as cluster:
        cluster.wait_for(0, CATCH_UP_S)
        cluster.publish(1)
        transfer_s = cluster.wait_for(1, CATCH_UP_S)
        version = 1
        while len(rows) < num_kills:
            version += 1
            row = kill_once(cluster, version, (LEARNER, RELAY, PEER)[len(rows) % 3], transfer_s, rng)
            if row.pop("hit"):
                rows.append(row)
                print(f"{len(rows)}/{num_kills}", row, flush=True)
        return rows, cluster.torn


def summary(rows: list[Row], torn: list[str]) -> dict[str, object]:
    seconds = [float(str(row["seconds"])) for row in rows]
    return {
        "kills": dict(collections.Counter(str(row["victim"]) for row in rows)),
        "torn": torn,
        "seconds_median": statistics.median(seconds),
        "seconds_max": max(seconds),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows, torn = check(Path(folder), num_kills=_KILLS.value, num_replicas=_REPLICAS.value, seed=_SEED.value)
    result = summary(rows, torn)
    print(json.dumps(result, indent=1))
    if _OUT.value:
        Path(_OUT.value).write_text(json.dumps({"summary": result, "rows": rows}, indent=1) + "\n")
    if torn:
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main)
