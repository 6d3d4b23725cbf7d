"""Weight transfer in figures: how small, how fast, and how long until a replica has committed a version.

    python -m scripts.bench_transfer --out=F.json [--quick] [--only=sizes,real,speed,blocking,sync,cluster]

writes {"sizes", "real", "speed", "blocking", "sync"}. sizes: percent of the dense size on the wire, everything counted (manifest
and headers), beside the entropy bound; 100 MB of bfloat16, uniform positions, +-1 code. real: the same on updates of a 22 M
parameter model. speed: GB of dense weights a second on one core. blocking: what the learner waits for. sync: from "learner step
done" to "committed" over shaped links (see scripts/link.py) and loopback; then 1, 4 and 16 replicas of a 150 MB model behind one
link of 0.2 Gbit/s, with and without relay and peers, beside what the cost model predicts (--only=cluster gives these rows alone).
Timings want a machine that does nothing else; --quick takes a tenth of the model and leaves out the slow link and the 16 replicas.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags
from jaxtyping import Shaped

from common import check_installation
from common.transfer import delta, fingerprint
from common.transfer.bits import flat_bits
from common.transfer.changes import estimate_density, find_changes, gather_run, run_positions
from common.transfer.encoder import DENSE_SHARE, encode_run, fingerprint_run
from common.transfer.manifest import BucketWriter, UpdateKey, UpdateKind
from common.transfer.publisher import Publisher
from common.transfer.shards import TensorLayout, build_layout
from common.transfer.store.memory import MemoryStore
from scripts import entry, transfer_baselines, transfer_cluster, transfer_data, transfer_sync
from scripts.transfer_data import Weights

_FLAGS = entry.flags_of(__name__)
_OUT = flags.DEFINE_string("out", None, "JSON file to write; without it figures are only printed.", flag_values=_FLAGS)
_QUICK = flags.DEFINE_bool("quick", False, "A smaller model and fewer links.", flag_values=_FLAGS)
_ONLY = flags.DEFINE_list("only", ["sizes", "real", "speed", "blocking", "sync"], "Parts to run.", flag_values=_FLAGS)

UNCHANGED = (0.99, 0.97, 0.9, 0.5)
LEARNING_RATES = (3e-4, 3e-5, 3e-6)

Row = dict[str, object]


def wire_bytes_of_ours(old: Weights, new: Weights) -> int:
    """Bytes of the update that takes a replica from `old` to `new`: buckets, manifest and the catalogue's line."""
    store = MemoryStore()
    publisher = Publisher(store)
    publisher.publish(0, old).result()
    publisher.publish(1, new).result()
    publisher.close()
    entry = store.catalog().find(UpdateKey(1, UpdateKind.DELTA))
    assert entry is not None
    return entry.wire_bytes + len(json.dumps(entry.to_json()))


def wire_bytes_of(method: str, old: Weights, new: Weights) -> int:
    parts = [transfer_baselines.encode(method, flat_bits(old[name]), flat_bits(new[name])) for name in new]
    return sum(len(part) for tensor_parts in parts for part in tensor_parts)


def entropy_bits(counts: Shaped[np.ndarray, "k"]) -> float:
    """Bits of a sequence whose symbols occur `counts` times, coded symbol by symbol."""
    counts = counts[counts > 0].astype(np.float64)
    return float(-(counts * np.log2(counts / counts.sum())).sum())


def bound_bits(old: Weights, new: Weights) -> float:
    """Per tensor: entropy of the changed mask plus empirical entropy of the XOR-ed values."""
    total = 0.0
    for name in new:
        xor = flat_bits(old[name]) ^ flat_bits(new[name])
        changed = xor[xor != 0]
        total += entropy_bits(np.array([len(changed), len(xor) - len(changed)]))
        total += entropy_bits(np.unique(changed, return_counts=True)[1])
    return total


def size_rows(old: Weights, new: Weights, bound_percent: float, extra: Row) -> list[Row]:
    dense_bytes = sum(array.nbytes for array in new.values())
    sizes = {"ours": wire_bytes_of_ours(old, new)}
    sizes |= {method: wire_bytes_of(method, old, new) for method in transfer_baselines.METHODS}
    return [
        extra | {"codec": codec, "percent_of_dense": 100 * size / dense_bytes, "bound_percent": bound_percent}
        for codec, size in sizes.items()
    ]


def sizes() -> list[Row]:
    rows = []
    for unchanged in UNCHANGED:
        old, new = transfer_data.synthetic_pair(unchanged)
        changed = 1 - unchanged
        # One bit more per change than the mask: +1 or -1.
        bits = -changed * np.log2(changed) - unchanged * np.log2(unchanged) + changed
        rows += size_rows({"w": old}, {"w": new}, 100 * bits / 16, {"unchanged": unchanged})
    return rows


def real() -> list[Row]:
    rows = []
    for lr in LEARNING_RATES:
        for update_idx, (old, new) in enumerate(transfer_data.real_updates(lr, num_updates=1 if _QUICK.value else 3)):
            num_elements = sum(array.size for array in new.values())
            same = sum(int(np.count_nonzero(flat_bits(old[name]) == flat_bits(new[name]))) for name in new)
            bound_percent = 100 * bound_bits(old, new) / (16 * num_elements)
            rows += size_rows(old, new, bound_percent, {"lr": lr, "update": update_idx, "unchanged": same / num_elements})
    return rows


def best_seconds(act: Callable[[], object], repeats: int = 5) -> float:
    """The shortest of several runs, in CPU seconds of this thread: what "per core" means, also while others use the core."""
    seconds = []
    for _ in range(repeats):
        started_s = time.thread_time()
        act()
        seconds.append(time.thread_time() - started_s)
    return min(seconds)


def _encode_codec_alone(tensor: TensorLayout, old: np.ndarray, new: np.ndarray) -> list[tuple[int, int, memoryview]]:
    payloads = []
    for run_idx in range(tensor.num_runs):
        size = sum(box.num_elements for box in tensor.run(run_idx))
        if estimate_density(tensor, run_idx, old, new) > DENSE_SHARE:
            parts, count = delta.encode_dense_changes(gather_run(tensor, run_idx, old), gather_run(tensor, run_idx, new))
        else:
            changes = find_changes(tensor, run_idx, old, new)
            count = len(changes.local)
            parts = delta.encode_changes(changes.local, changes.old, changes.new, size) if count else []
        if count:
            payloads.append((run_idx, size, memoryview(b"".join(parts))))
    return payloads


def _encode_all(tensor: TensorLayout, old: np.ndarray, new: np.ndarray) -> None:
    writer = BucketWriter(digests=False)
    for run_idx in range(tensor.num_runs):
        encoded = encode_run(tensor, run_idx, old, new, 0, None)
        if encoded is not None:
            writer.add(run_idx, encoded.fingerprint, encoded.parts)
    b"".join(writer.finish()[0])


def _decode(tensor: TensorLayout, old: np.ndarray, payloads: Sequence[tuple[int, int, memoryview]], *, fingerprints: bool) -> None:
    """To absolute values at positions of the tensor, the form in which an update is staged."""
    for run_idx, size, payload in payloads:
        decoded = delta.decode_run(payload, size, old.dtype)
        if decoded.local is None:
            values = gather_run(tensor, run_idx, old) + decoded.steps if decoded.values is None else decoded.values
            if fingerprints:
                fingerprint_run(tensor, run_idx, values)
            continue
        assert decoded.steps is not None
        positions = run_positions(tensor, run_idx, decoded.local)
        before = old.take(positions.view(np.int64))
        after = before + decoded.steps
        if fingerprints:
            fingerprint.of_change(positions, before, after, tensor.row_elements)


def speed() -> list[Row]:
    return [row for unchanged in UNCHANGED for row in speed_rows(unchanged)]


def speed_rows(unchanged: float) -> list[Row]:
    pair = transfer_data.synthetic_pair(unchanged)
    tensor = build_layout({"w": (pair[0].shape, "bfloat16")}).tensors[0]
    old, new = (flat_bits(array) for array in pair)
    target = np.empty_like(new)
    payloads = _encode_codec_alone(tensor, old, new)

    def gb_s(act: Callable[[], object], repeats: int = 5) -> float:
        return new.nbytes / 1e9 / best_seconds(act, repeats)

    memcpy_gb_s = gb_s(lambda: np.copyto(target, new))
    runs = np.split(new, tensor.num_runs)
    rows: list[Row] = [
        {
            "codec": "ours",
            "unchanged": unchanged,
            "encode_gb_s": gb_s(lambda: _encode_codec_alone(tensor, old, new)),
            "decode_gb_s": gb_s(lambda: _decode(tensor, old, payloads, fingerprints=False)),
            "memcpy_gb_s": memcpy_gb_s,
            "fingerprint_gb_s": gb_s(lambda: [fingerprint_run(tensor, i, run) for i, run in enumerate(runs)], 2),
            "encode_all_gb_s": gb_s(lambda: _encode_all(tensor, old, new)),
            "decode_all_gb_s": gb_s(lambda: _decode(tensor, old, payloads, fingerprints=True)),
        }
    ]
    for method in transfer_baselines.METHODS:
        rows.append(_baseline_speed(method, old, new) | {"unchanged": unchanged, "memcpy_gb_s": memcpy_gb_s})
    return rows


def _baseline_speed(method: str, old: np.ndarray, new: np.ndarray) -> Row:
    wire = memoryview(b"".join(transfer_baselines.encode(method, old, new)))
    encode_s = best_seconds(lambda: transfer_baselines.encode(method, old, new), 3)
    decode_s = best_seconds(lambda: list(transfer_baselines.decode(method, wire, old)), 3)
    return {"codec": method, "encode_gb_s": new.nbytes / 1e9 / encode_s, "decode_gb_s": new.nbytes / 1e9 / decode_s}


def blocking() -> list[Row]:
    """How long `publish` keeps the learner waiting, for a model of 100 M parameters whose last version has arrived."""
    shapes = transfer_data.qwen3_shapes(num_layers=6, vocab_size=20_000)
    weights = transfer_data.model_weights(shapes)
    publisher = Publisher(MemoryStore())
    publisher.publish(0, weights).result()
    rows: list[Row] = []
    for version, unchanged in enumerate((0.99, 0.5), start=1):
        weights = transfer_data.step_model(weights, 1 - unchanged, version)
        started_s = time.perf_counter()
        publication = publisher.publish(version, weights)
        blocked_s = time.perf_counter() - started_s
        publication.wait_released()
        released_s = time.perf_counter() - started_s
        publication.result()
        parameters = sum(array.size for array in weights.values())
        rows.append({"parameters": parameters, "unchanged": unchanged, "blocked_s": blocked_s, "arrays_read_until_s": released_s})
    publisher.close()
    return rows


def sync() -> list[Row]:
    return transfer_sync.measure(quick=_QUICK.value) + cluster()


def cluster() -> list[Row]:
    return transfer_cluster.measure(quick=_QUICK.value)


def main(argv: Sequence[str]) -> None:
    check_installation(__file__)
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    parts: dict[str, Callable[[], list[Row]]] = {
        "sizes": sizes,
        "real": real,
        "speed": speed,
        "blocking": blocking,
        "sync": sync,
        "cluster": cluster,
    }
    unknown = sorted(set(_ONLY.value) - set(parts))
    if unknown:
        raise app.UsageError(f"--only={','.join(unknown)} names no part; use some of {','.join(parts)}")
    result: dict[str, list[Row]] = {}
    for name in _ONLY.value:
        result[name] = parts[name]()
        print(f"\n{name}")
        for row in result[name]:
            print(
                "  "
                + "  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
            )
        if _OUT.value:
            Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
