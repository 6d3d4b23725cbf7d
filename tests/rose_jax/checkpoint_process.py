"""Programs that the checkpoint tests start as processes of their own: `python -m tests.rose_jax.checkpoint_process NAME ARGUMENTS`.

save_forever FOLDER: saves small checkpoints, one after the other, until it is killed.
train_one_step FOLDER PROCESS_ID PORT: one of two jax.distributed processes of four fake devices each; restores the newest
checkpoint onto a 2 x 4 mesh, makes one learner step and saves.
"""

import os
import sys
from pathlib import Path


def save_forever(folder: str) -> None:
    import jax
    import numpy as np

    from rose_jax.checkpoint import Checkpoints

    checkpoints = Checkpoints(Path(folder), keep=2, fingerprint={})
    step = max(checkpoints.steps, default=0)
    while True:
        step += 1
        arrays = {name: {"x": jax.device_put(np.full((64, 64), step, np.float32))} for name in ("params", "opt_state")}
        checkpoints.save(step, arrays=arrays, progress={"step": step})
        print(step, flush=True)


def train_one_step(folder: str, process_id: str, port: str) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process_id))
    from flax import nnx

    from common.config import MeshConfig
    from rose_jax.checkpoint import Checkpoints
    from rose_jax.learner import Learner
    from rose_jax.mesh import make_mesh
    from rose_jax.models.qwen3 import create_model
    from tests.rose_jax.training_data import MODEL_CONFIG, scored_batch, small_config

    config = small_config()
    config.mesh = MeshConfig(fsdp=2, tensor=4)
    mesh = make_mesh(config.mesh)
    learner = Learner(config, MODEL_CONFIG, mesh, nnx.state(create_model(MODEL_CONFIG, seed=1, mesh=mesh)))
    checkpoints = Checkpoints(Path(folder), keep=2, fingerprint={})
    restored = checkpoints.restore_latest(learner.abstract_arrays())
    assert restored is not None
    learner.load(restored.arrays, restored.progress)
    learner.update(scored_batch(seed=1))
    checkpoints.save(learner.step, arrays=learner.arrays(), progress=learner.progress())
    checkpoints.close()
    jax.distributed.shutdown()


if __name__ == "__main__":
    num_devices = {"save_forever": 1, "train_one_step": 4}[sys.argv[1]]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    {"save_forever": save_forever, "train_one_step": train_one_step}[sys.argv[1]](*sys.argv[2:])
