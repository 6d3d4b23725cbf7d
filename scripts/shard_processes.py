"""The processes of scripts.check_shards: `python -m scripts.shard_processes ROLE ...`, driven by a line of JSON for each command.

learner: one of several jax.distributed processes of a real learner; every command makes a learner step on the same random groups
and publishes the version. vllm, jetstream: a LocalReplica that serves while it follows, and says which of its live tensors differ
from the learner's. Each ends when its stdin closes. Secrets come by the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from common import check_installation
from common.config import Config, MeshConfig
from common.serving.replica import LocalReplica
from common.transfer.secrets import read_secret
from common.transfer.store.http_client import HttpStore
from common.types import Request, SamplingKey, SamplingParams

TOKEN_SOURCE = "env:ROSE_STORE_TOKEN"
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "tie_word_embeddings": True,
}
NUM_PROCESSES, DEVICES_EACH = 2, 4
GROUPS, GROUP_SIZE, TRAJECTORY_TOKENS = 2, 4, 24
REQUEST_TOKENS = 24


def small_config() -> Config:
    """A learner on a 2 x 4 mesh and replicas with few slots; bfloat16 is published and computed with."""
    config = Config()
    config.warmup.num_updates = 0
    config.mesh = MeshConfig(fsdp=2, tensor=4)
    config.grpo.prompts_per_step, config.grpo.group_size = GROUPS, GROUP_SIZE
    config.optim.lr = 1e-4
    config.model.weights_dtype = config.model.compute_dtype = "bfloat16"
    config.sampler.max_slots, config.sampler.max_context_tokens = 4, 64
    config.transfer.anchor_interval = 3
    return config


def answer(**fields: object) -> None:
    print(json.dumps(fields), file=_ANSWERS, flush=True)


def commands() -> Iterator[dict[str, str]]:
    for line in sys.stdin:
        yield json.loads(line)


def learner(process_id: int, coordinator: str, store_url: str) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes=NUM_PROCESSES, process_id=process_id)
    from flax import nnx

    from rose_jax.batching import rl_batch
    from rose_jax.export import named_tensors, save_checkpoint
    from rose_jax.learner import Learner
    from rose_jax.mesh import make_mesh, param_shardings, place
    from rose_jax.models.qwen3 import create_model
    from rose_jax.models.qwen3_config import Qwen3Config
    from rose_jax.publishing import LearnerPublisher

    config, model_config = small_config(), Qwen3Config(**MODEL)
    mesh = make_mesh(config.mesh)
    on_host = jax.tree.map(np.asarray, nnx.state(create_model(model_config, seed=0)))
    trained = Learner(config, model_config, mesh, jax.tree.map(place, on_host, param_shardings(model_config, on_host, mesh)))
    publisher = LearnerPublisher(config, HttpStore(store_url, token=read_secret(TOKEN_SOURCE), timeout_s=60.0))
    for command in commands():
        trained.update(rl_batch(_scored_groups(trained.version)))
        _, metrics = publisher.publish(trained)
        # Only for the comparison: the whole model on one host, as a checkpoint is saved. The transfer gathers nothing.
        save_checkpoint(Path(command["truth"]), trained.published_params(), model_config, dtype="bfloat16")
        shards = {name: len(tensor.addressable_shards) for name, tensor in named_tensors(trained.params)}
        answer(version=trained.version, local_shards=max(shards.values()), **metrics)
    publisher.close()


def _scored_groups(seed: int) -> list:
    """Random trajectories with random rewards: any would do, as long as every process has the same."""
    from common.types import EpisodeEnd, Group, Split, Task, Trajectory
    from rose_jax.advantages import score_groups

    rng = np.random.default_rng(seed)
    task = Task(task_id="random", split=Split.TRAIN, spec="")

    def trajectory(trajectory_id: int, group_id: int) -> Trajectory:
        loss_mask = np.arange(TRAJECTORY_TOKENS) >= TRAJECTORY_TOKENS // 2
        reward = float(trajectory_id % 2)
        return Trajectory(
            trajectory_id=trajectory_id,
            group_id=group_id,
            task=task,
            token_ids=rng.integers(1, MODEL["vocab_size"], TRAJECTORY_TOKENS).astype(np.int32),
            loss_mask=loss_mask,
            behavior_logprobs=np.where(loss_mask, -8.0, 0.0).astype(np.float32),
            weight_versions=np.zeros(TRAJECTORY_TOKENS, np.int32),
            reward=reward,
            success=reward > 0,
            end=EpisodeEnd.DONE,
            turns=(),
        )

    groups = [
        Group(group_id=g, task=task, trajectories=tuple(trajectory(g * GROUP_SIZE + i, g) for i in range(GROUP_SIZE)))
        for g in range(GROUPS)
    ]
    return score_groups(groups, normalize_std=True)


def vllm(store_url: str) -> None:
    from rose_gpu.replica import VllmReplica
    from rose_gpu.vllm.store_address import StoreAddress
    from rose_jax.models.qwen3_config import Qwen3Config

    config = small_config()
    config.sampler.backend, config.sampler.tensor_parallel = "vllm", 2
    store = HttpStore(store_url, token=read_secret(TOKEN_SOURCE))
    address = StoreAddress(where=store_url, token=TOKEN_SOURCE)
    replica = VllmReplica("vllm", config, Qwen3Config(**MODEL).to_hf(), store, ranks_store=address)
    asyncio.run(follow(replica, replica.differing_tensors))


def jetstream(store_url: str) -> None:
    import jax
    from jax.sharding import AxisType

    from rose_jax.models.checkpoint_table import TENSOR_AXIS
    from rose_jax.models.qwen3_config import Qwen3Config
    from rose_jax.replica import JaxReplica

    mesh = jax.make_mesh((2,), (TENSOR_AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    store = HttpStore(store_url, token=read_secret(TOKEN_SOURCE))
    replica = JaxReplica("jetstream", small_config(), Qwen3Config(**MODEL), store, mesh=mesh)
    asyncio.run(follow(replica, replica.differing_tensors))


async def follow(replica: LocalReplica, differing: Callable[[dict[str, np.ndarray]], list[str]]) -> None:
    """Serve, and take every version that a command names; a request is in flight during each change but the first."""
    from rose_jax.hf_folder import open_tensors

    async with replica:
        answer(ready=True)
        lines = iter(commands())
        while (command := await asyncio.to_thread(next, lines, None)) is not None:
            version = int(command["version"])
            serving = None if replica.load().weight_version is None else asyncio.create_task(replica.generate(_request(version)))
            report = await replica.stage(version)
            await replica.commit()
            sampled_under = () if serving is None else (await serving).weight_versions
            tensors = open_tensors(Path(command["truth"]))
            truth = {name: np.asarray(stored.read_slice((slice(None),) * len(stored.shape))) for name, stored in tensors.items()}
            answer(
                version=replica.load().weight_version,
                wire_bytes=report.wire_bytes,
                tensors=len(truth),
                differing=differing(truth),
                sampled_under=sorted(set(sampled_under)),
            )


def _request(version: int) -> Request:
    params = SamplingParams(max_tokens=REQUEST_TOKENS, temperature=1.0)
    key = SamplingKey(run_seed=0, trajectory_id=version, turn_idx=0)
    return Request(request_id=f"live-{version}", prompt_token_ids=(1, 2, 3, 4), sampling=params, key=key)


def main(role: str, *arguments: str) -> None:
    check_installation(__file__)
    match role:
        case "learner":
            learner(int(arguments[0]), *arguments[1:])
        case "vllm":
            vllm(*arguments)
        case "jetstream":
            jetstream(*arguments)
        case _:
            raise ValueError(f"{role!r} is no role; use learner, vllm or jetstream")


if __name__ == "__main__":
    # Libraries print to stdout: answers get a descriptor of their own, and what others print goes to stderr.
    _ANSWERS = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt):
        main(*sys.argv[1:])
