"""Qwen3-8B learns Household: the learner on one host of a TPU v5p slice, four JetStream replicas on the other, one chip each.

Hardware: TPU v5p-16 (2 hosts, 4 chips of 95 GB each). Weights, gradients and AdamW of the learner are 36 GB a chip.
Duration: unmeasured. Expected: unmeasured.
Command: chip by chip (i = 0..3) on the replicas' host, then on the learner's
    TPU_VISIBLE_CHIPS=i TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_PROCESS_BOUNDS=1,1,1 python -m scripts.serve \\
        --config=configs/qwen3_8b_tpu.py --host=rose-replicas --port=800i --replica_id=tpui --tokens_per_step=8 \\
        --tls_certificate=/etc/rose/tls.pem --tls_key=/etc/rose/tls.key --online_token=file:/etc/rose/online_token \\
        --rollout_token=file:/etc/rose/rollout_token --control_token=file:/etc/rose/control_token \\
        --store=https://rose-learner:7000 --store_token=file:/etc/rose/store_token --store_ca=/etc/rose/ca.pem
    python -m scripts.train --config=configs/qwen3_8b_tpu.py --workdir=runs/qwen3_8b_tpu
"""

from common.config import Config, ReplicaConfig

NUM_REPLICAS = 4


def get_config() -> Config:
    config = learner_config()
    config.fleet.replicas += tpu_replicas()
    return config


def tpu_replicas() -> list[ReplicaConfig]:
    """One JetStream replica a chip: 16 GB of bfloat16 weights leave most of it to the cache."""
    return [ReplicaConfig(name=f"tpu{idx}", address=f"https://rose-replicas:{8000 + idx}") for idx in range(NUM_REPLICAS)]


def learner_config() -> Config:
    """The run but for who samples; what replicas run with (sampler) is the same on every accelerator."""
    config = Config()
    config.num_versions = 200
    config.model.checkpoint = "/models/Qwen3-8B"
    config.model.compute_dtype = "bfloat16"
    config.model.remat = True
    config.mesh.fsdp = 4
    config.env.factory = "common.rollout.envs.household:HouseholdSuite"
    config.env.options.max_turns = 20
    config.warmup.num_updates = 0
    config.sampler.max_slots = 64
    config.sampler.max_context_tokens = 8192
    config.sampler.max_turn_tokens = 256
    config.sampler.page_tokens = 64
    config.grpo.prompts_per_step = 32
    config.grpo.num_minibatches = 1
    config.optim.lr = 1e-6
    config.optim.schedule = "constant"
    config.optim.accumulation_steps = 64  # one row of at most 8,192 tokens a chip at a time
    config.transfer.verify = False  # reads 16 GB a version on each replica; manifests are checked all the same
    config.eval.num_tasks = 200
    config.fleet.rollout_token = "file:/etc/rose/rollout_token"
    config.fleet.control_token = "file:/etc/rose/control_token"
    config.fleet.ca = "/etc/rose/ca.pem"
    config.fleet.store_host = "rose-learner"
    config.fleet.store_port = 7000
    config.fleet.store_token = "file:/etc/rose/store_token"
    config.fleet.store_certificate = "/etc/rose/tls.pem"
    config.fleet.store_key = "/etc/rose/tls.key"
    return config
