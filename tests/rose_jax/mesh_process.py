"""One of two jax.distributed processes of four fake devices: `python -m tests.rose_jax.mesh_process FOLDER PROCESS_ID PORT`.

Loads FOLDER/before onto a 2 x 4 mesh, computes log-probabilities, doubles all weights and saves them as FOLDER/after. The first
process then does the computation once more on one device of its own, for comparison.
"""

import os
import sys
from pathlib import Path

TOKENS_SHAPE = (8, 16)


def main(folder: Path, process_id: int, port: str) -> None:
    import jax
    import numpy as np

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process_id)
    from flax import nnx
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    from common.config import MeshConfig
    from rose_jax.export import load_checkpoint, save_checkpoint
    from rose_jax.mesh import make_mesh, place
    from rose_jax.models.qwen3 import abstract_model, sequence_logprobs

    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    config, params = load_checkpoint(folder / "before", mesh=mesh)
    graph = nnx.graphdef(abstract_model(config))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, TOKENS_SHAPE, dtype=np.int32)

    @jax.jit
    def logprobs(params: nnx.State, tokens: jax.Array) -> jax.Array:
        return sequence_logprobs(nnx.merge(graph, params), tokens, chunk_tokens=64, remat=False)[0]

    with jax.set_mesh(mesh):
        sharded = logprobs(params, place(tokens, NamedSharding(mesh, PartitionSpec("fsdp"))))
    whole = multihost_utils.process_allgather(sharded, tiled=True)
    save_checkpoint(folder / "after", jax.tree.map(lambda x: 2 * x, params), config, dtype="float32", max_shard_bytes=20_000)
    assert (folder / "after").is_dir(), "every process returns when the folder is there"
    if process_id == 0:
        np.save(folder / "logprobs.npy", whole)
        _, here = load_checkpoint(folder / "before")
        np.save(folder / "logprobs_one_process.npy", logprobs(here, tokens))
    jax.distributed.shutdown()


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
