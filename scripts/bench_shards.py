"""What each rank of a replica fetches, beside what it owns: for learners and replicas sharded in many ways.

    python -m scripts.bench_shards --out=shards.json [--only=arithmetic,measured]

arithmetic: models of real size, from shapes alone. For every layout the bytes that a rank owns of the model in
dense form, the runs it has to fetch for them, and the worst rank's and the worst matrix's ratio of the two. Runs have 1 MiB or more
where tensors allow it, so ranks of small models fetch more than they own. measured: a model that fits memory is published by a
learner of as many processes (here threads), and ranks fetch a whole version and one of which 1 % changed, everything counted: runs,
indexes, manifest. `share_ratio` is what a rank fetched over its share of what a receiver of the whole model fetches.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import app, flags

from common import check_installation
from common.transfer.bits import DTYPES, ITEM_BYTES
from common.transfer.boxes import Box
from common.transfer.holding import Holding, match_names
from common.transfer.ownership import Owners, merged
from common.transfer.publisher import Publisher
from common.transfer.rank_boxes import EMBEDDING, HEAD, ModelShape, Rank, Specs, ranks
from common.transfer.rank_target import RankTarget
from common.transfer.shards import ROW_PARALLEL_SUFFIXES, WeightLayout, build_layout
from common.transfer.source import ShardedTensor, Source
from common.transfer.store.memory import MemoryStore
from common.transfer.subscriber import Subscriber
from common.transfer.writers import Writers
from scripts import entry, transfer_data

_FLAGS = entry.flags_of(__name__)
_OUT = flags.DEFINE_string("out", None, "JSON file to write; without it figures are only printed.", flag_values=_FLAGS)
_ONLY = flags.DEFINE_list("only", ["arithmetic", "measured"], "Parts to run.", flag_values=_FLAGS)

Row = dict[str, object]

QWEN3_0_6B = ModelShape(num_layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, feed_forward=3072, vocab=151_936, tied=True)
QWEN3_8B = ModelShape(
    num_layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, feed_forward=12_288, vocab=151_936, tied=False
)
QWEN3_32B = dataclasses.replace(QWEN3_8B, num_layers=64, hidden=5120, heads=64, feed_forward=25_600)
SMALL = ModelShape(num_layers=2, hidden=2048, heads=16, kv_heads=8, head_dim=128, feed_forward=4096, vocab=8192, tied=True)
MODELS = {"qwen3_0_6b": QWEN3_0_6B, "qwen3_8b": QWEN3_8B, "qwen3_32b": QWEN3_32B, "small": SMALL}


@dataclasses.dataclass(frozen=True)
class Learner:
    """A mesh of fsdp x tensor devices, an equal number of them in each process, in order."""

    fsdp: int
    tensor: int
    processes: int

    def owners(self, name: str, shape: tuple[int, ...]) -> Owners:
        """Matrices are cut along both axes as the JAX learner cuts them; vectors are held everywhere."""
        cuts = [1] * len(shape)
        if len(shape) == 2:
            cuts = [self.fsdp, self.tensor] if name.endswith(ROW_PARALLEL_SUFFIXES) else [self.tensor, self.fsdp]
        extent = tuple(size // n for size, n in zip(shape, cuts, strict=True))
        per_process = self.fsdp * self.tensor // self.processes
        owners = []
        for place in itertools.product(*(range(n) for n in cuts)):
            along = place[::-1] if len(place) == 2 and not name.endswith(ROW_PARALLEL_SUFFIXES) else place
            device = along[0] * self.tensor + along[1] if len(place) == 2 else 0
            owners.append((Box(tuple(map(int.__mul__, place, extent)), extent), device // per_process))
        return merged(shape, owners, name)


ONE, TWO, EIGHT = Learner(1, 1, 1), Learner(2, 4, 2), Learner(8, 1, 8)
ARITHMETIC = [
    ("qwen3_0_6b", ONE, 2, 1),
    ("qwen3_0_6b", ONE, 8, 1),
    *(("qwen3_8b", learner, *replica) for learner in (ONE, TWO, EIGHT) for replica in ((2, 1), (4, 1), (8, 2), (16, 1), (8, 4))),
    ("qwen3_32b", EIGHT, 8, 2),
    ("qwen3_32b", EIGHT, 16, 4),
]
MEASURED = [("small", learner, *replica) for learner in (ONE, TWO) for replica in ((2, 1), (4, 2))]


def layout_of(shape: ModelShape, learner: Learner) -> WeightLayout:
    specs = shape.specs()
    owners = {name: learner.owners(name, size) for name, (size, _) in specs.items()} if learner.processes > 1 else None
    return build_layout(specs, tied={HEAD: EMBEDDING} if shape.tied else None, owners=owners)


class _BoxesOnly:
    """What a rank would own, without its arrays."""

    def __init__(self, rank: Rank, specs: Specs) -> None:
        self._boxes, self._dtype = rank.boxes(specs), next(iter(specs.values()))[1]

    def specs(self) -> Specs:
        return {name: (shape, self._dtype) for name, (shape, _) in self._boxes.items()}

    def owned(self, name: str) -> tuple[Box, ...]:
        return (self._boxes[name][1],)


def arithmetic() -> list[Row]:
    rows: list[Row] = []
    for model, learner, tensor, pipeline in ARITHMETIC:
        shape = MODELS[model]
        layout = layout_of(shape, learner)
        per_rank = [rank_bytes(layout, shape, rank) for rank in ranks(shape, tensor, pipeline)]
        rows.append(
            {
                **_who(model, learner, tensor, pipeline),
                "owned_mb": max(sum(owned.values()) for owned, _ in per_rank) / 1e6,
                "fetched_mb": max(sum(fetched.values()) for _, fetched in per_rank) / 1e6,
                "ratio": max(sum(fetched.values()) / sum(owned.values()) for owned, fetched in per_rank),
                "worst_matrix": max(
                    fetched[t] / owned[t] for owned, fetched in per_rank for t in owned if len(layout.tensors[t].shape) == 2
                ),
                "runs": layout.num_runs,
                "buckets": len(layout.buckets),
            }
        )
    return rows


def rank_bytes(layout: WeightLayout, shape: ModelShape, rank: Rank) -> tuple[dict[int, int], dict[int, int]]:
    """Dense bytes that a rank owns and that it fetches, by tensor."""
    target = _BoxesOnly(rank, shape.specs())
    names = match_names(layout, target.specs(), {*shape.specs(), HEAD}, ())
    holding = Holding(layout, names, target)  # type: ignore[arg-type]  # it reads and writes nothing
    owned = {t: target.owned(name)[0].num_elements * ITEM_BYTES[layout.tensors[t].dtype] for t, name in enumerate(names) if name}
    fetched = dict.fromkeys(owned, 0)
    for run in holding.runs:
        fetched[layout.locate(run)[0]] += layout.run_bytes(run)
    return owned, fetched


def measured() -> list[Row]:
    rows: list[Row] = []
    for model, learner, tensor, pipeline in MEASURED:
        shape = MODELS[model]
        versions = [_weights(shape, 0)]
        versions.append(transfer_data.step_model(versions[0], 0.01, 1))
        store = MemoryStore()
        publishers = [
            Publisher(
                store,
                tied={HEAD: EMBEDDING},
                writers=Writers(writer=i, num_writers=learner.processes, lineage="bench"),
            )
            for i in range(learner.processes)
        ]
        members = ranks(shape, tensor, pipeline)
        followers = [_follower(store, shape, rank, members) for rank in members]
        whole = _follower(store, shape, ranks(shape, 1, 1)[0], ranks(shape, 1, 1))
        for version, weights in enumerate(versions):
            started = [p.publish(version, _sources(learner, weights, i)) for i, p in enumerate(publishers)]
            for publication in started:
                publication.result()
            all_bytes = _follow(whole, weights)
            fetched_bytes = [_follow(follower, weights) for follower in followers]
            shares = [_owned_share(shape, rank) for rank in members]
            rows.append(
                {
                    **_who(model, learner, tensor, pipeline),
                    "version": "whole" if version == 0 else "1 % changed",
                    "whole_mb": all_bytes / 1e6,
                    "fetched_mb": max(fetched_bytes) / 1e6,
                    "share_ratio": max(got / (all_bytes * share) for got, share in zip(fetched_bytes, shares, strict=True)),
                }
            )
        for publisher in publishers:
            publisher.close()
    return rows


Follower = tuple[Subscriber, Mapping[str, tuple[Box, np.ndarray]]]


def _follower(store: MemoryStore, shape: ModelShape, rank: Rank, members: Sequence[Rank]) -> Follower:
    specs = shape.specs()
    boxes = rank.boxes(specs)
    arrays = {name: (box, np.zeros(box.extent, DTYPES["bfloat16"])) for name, (_, box) in boxes.items()}
    target = RankTarget({name: (size, "bfloat16") for name, (size, _) in boxes.items()}, {n: [part] for n, part in arrays.items()})
    elsewhere = {name for member in members for name in member.names(specs)} - boxes.keys()
    receiver_id = f"t{rank.tensor_rank}p{rank.pipeline_rank}of{len(members)}"
    return Subscriber(store, target, receiver_id=receiver_id, skip_sources=elsewhere), arrays


def _follow(follower: Follower, weights: Mapping[str, np.ndarray]) -> int:
    """Bring a rank to the newest version, compare its bits with slices of the new weights, and say what it fetched."""
    subscriber, arrays = follower
    staged = subscriber.stage()
    assert staged is not None
    subscriber.commit(staged)
    for name, (box, array) in arrays.items():
        if array.tobytes() != weights[name if name in weights else EMBEDDING][box.slices].tobytes():
            raise AssertionError(f"{name} {box} is not what was published")
    return staged.wire_bytes


def _owned_share(shape: ModelShape, rank: Rank) -> float:
    specs = shape.specs()
    owned = {EMBEDDING if name == HEAD and shape.tied else name: box.num_elements for name, (_, box) in rank.boxes(specs).items()}
    return sum(owned.values()) / sum(int(np.prod(size)) for size, _ in specs.values())


def _weights(shape: ModelShape, seed: int) -> dict[str, np.ndarray]:
    shapes = {name: size for name, (size, _) in shape.specs().items()}
    return transfer_data.model_weights(shapes, seed)


def _sources(learner: Learner, weights: Mapping[str, np.ndarray], writer: int) -> dict[str, Source]:
    """What one process of the learner hands to its publisher: of each tensor, a way to read the boxes that are its own."""
    if learner.processes == 1:
        return dict(weights)

    def reader(array: np.ndarray) -> Callable[[Box], np.ndarray]:
        return lambda box: array[box.slices]

    return {
        name: ShardedTensor(shape=a.shape, dtype=a.dtype, owners=learner.owners(name, a.shape), read=reader(a))
        for name, a in weights.items()
    }


def _who(model: str, learner: Learner, tensor: int, pipeline: int) -> Row:
    mesh = f"{learner.fsdp}x{learner.tensor} in {learner.processes}"
    return {"model": model, "learner": mesh, "replica": f"TP{tensor} x PP{pipeline}"}


def main(argv: Sequence[str]) -> None:
    check_installation(__file__)
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    parts: dict[str, Callable[[], list[Row]]] = {"arithmetic": arithmetic, "measured": measured}
    unknown = sorted(set(_ONLY.value) - set(parts))
    if unknown:
        raise app.UsageError(f"--only={','.join(unknown)} names no part; use some of {','.join(parts)}")
    result: dict[str, list[Row]] = {}
    for name in _ONLY.value:
        result[name] = parts[name]()
        print(f"\n{name}")
        columns = list(result[name][0])
        print("  " + "  ".join(f"{column:>12}" for column in columns))
        for row in result[name]:
            cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
            print("  " + "  ".join(f"{cell:>12}" for cell in cells))
        if _OUT.value:
            Path(_OUT.value).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
