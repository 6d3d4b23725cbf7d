"""The configuration of a run: plain mutable dataclasses, validated once in main and read-only from then on.

A file under configs/ returns a Config from get_config(); `--config.optim.lr=3e-4` changes a field and a mistyped name fails.
Field types stay plain and annotations are not postponed: ml_collections 1.1.0 reads them at run time.
"""

import dataclasses

from ml_collections import ConfigDict

DTYPES = ("float32", "bfloat16")
BACKENDS = ("jetstream", "vllm")
AGGREGATIONS = ("token", "sequence", "constant")


@dataclasses.dataclass
class ModelConfig:
    """A Qwen3 (dense) model: read from a Hugging Face folder when `checkpoint` is set, else made new in the shape below."""

    checkpoint: str | None = None
    hidden_size: int = 64
    num_layers: int = 3
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 192
    tie_word_embeddings: bool = True
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    embedding_init_std: float = 0.125
    max_position_embeddings: int = 1024
    weights_dtype: str = "bfloat16"
    """What is published and what every forward pass sees; the master copy is float32."""
    compute_dtype: str = "float32"
    """Activations and matrix products."""
    logprob_chunk_tokens: int = 1024
    """Positions whose full-vocabulary logits exist at a time (float32 logits of 32,768 x 151,936 would be 20 GB)."""
    remat: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""


@dataclasses.dataclass
class MeshConfig:
    """Devices = fsdp x tensor. 1 x 1 is one device."""

    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass
class EnvConfig:
    """`factory` is the module:Class of a TaskSuite, built with `options`."""

    factory: str = "common.rollout.envs.frozen_lake:FrozenLakeSuite"
    options: ConfigDict = dataclasses.field(default_factory=ConfigDict)
    turn_timeout_s: float = 10.0


@dataclasses.dataclass
class SamplerConfig:
    """The engine that generates. `max_context_tokens` bounds prompt + completion of one request."""

    backend: str = "jetstream"
    """jetstream (JAX) or vllm, which needs `make serve-env`."""
    tensor_parallel: int = 1
    """vllm only: ranks that share the model, each a process."""
    own_process: bool = False
    """vllm only: run a single rank in a process of its own too, as CUDA needs beside another engine."""
    max_slots: int = 64
    max_context_tokens: int = 384
    max_step_tokens: int = 8192
    """Bound on one step: a token for each decoding sequence, the rest for prefill."""
    tokens_per_sequence: int = 8
    """jetstream only: tokens that a decoding sequence generates in one step while no prompt waits: less host work for each."""
    max_turn_tokens: int = 4
    temperature: float = 1.0
    page_tokens: int = 8
    """jetstream only: tokens of a cache page, the unit of memory and prefix reuse, and of the tiles prompts are computed in."""
    max_prefill_tiles: int = 64
    """jetstream only: tiles of page_tokens that one step can prefill."""
    stale_cache: str = "drop"
    """What new weights do to cached keys and values of older ones: keep, drop or tag (common.serving.engine.StaleCache)."""
    invariant: bool = False
    """jetstream only: tokens and log-probabilities of a request are bit for bit the same whatever runs beside it; slower."""


@dataclasses.dataclass
class WarmupConfig:
    """Supervised updates on demonstrations before reinforcement learning; 0 updates leaves the model as it is."""

    num_updates: int = 180
    batch_size: int = 48
    lr: float = 4e-3
    random_action_share: float = 0.35
    validation_interval: int = 20
    """Updates between losses on demonstrations of validation tasks; the weights with the lowest are kept. 0 keeps the last."""
    num_validation_tasks: int = 96


@dataclasses.dataclass
class GrpoConfig:
    """Group-relative policy optimisation (DeepSeekMath, arXiv 2402.03300, section 4.1) with the usual variations."""

    prompts_per_step: int = 8
    group_size: int = 8
    num_minibatches: int = 2
    num_epochs: int = 1
    normalize_std: bool = True
    """Divide a group's advantages by their standard deviation (off: Dr. GRPO, arXiv 2503.20783)."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    """Weight of the k3 estimate of KL(policy || warm-up policy); 0 keeps no reference model."""
    aggregation: str = "token"
    """token: mean over the batch's agent tokens. sequence: mean over trajectories of their token means. constant: sum over tokens
    divided by (trajectories x constant_normalizer)."""
    constant_normalizer: float = 64.0
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal by new prompts (DAPO, arXiv 2503.14476, section 3.2)."""
    max_refills: int = 4
    """Rounds of new prompts before a step goes on with the groups it has."""


@dataclasses.dataclass
class OptimConfig:
    """AdamW for reinforcement learning; the warm-up has its own rate and the same betas."""

    lr: float = 3e-4
    schedule: str = "constant"
    """constant, linear or cosine (to zero over num_versions)."""
    lr_warmup_updates: int = 0
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    accumulation_steps: int = 1
    """Micro-batches that one update is the sum of; bounds memory, not the result."""


@dataclasses.dataclass
class TransferConfig:
    """How new weights reach the replicas."""

    anchor_interval: int = 16
    """Versions from one full anchor to the next; between them only what changed travels."""
    timeout_s: float = 60.0
    """How long nothing may arrive before a replica gives up staging and starts afresh."""
    verify: bool = True
    """Compare each committed version with the learner's, bit by bit, on every replica."""


@dataclasses.dataclass
class ReplicaConfig:
    """One replica process: started by the run on its own machine, or attached to where `python -m scripts.serve` runs already."""

    name: str = ""
    """In logs and metrics, such as jetstream0."""
    backend: str = "jetstream"
    tensor_parallel: int = 1
    """vllm only: ranks that share the model, each a process."""
    coserve: bool = False
    """Serve the model of Config.coserving to online clients on the same device, and run rollouts in the gaps of that."""
    address: str | None = None
    """http(s)://HOST:PORT of a running one; None starts one."""
    environment: ConfigDict = dataclasses.field(default_factory=ConfigDict)
    """Variables for a process that is started: the devices it sees, its threads."""


@dataclasses.dataclass
class FleetConfig:
    """Replica processes that share the rollouts. Without any, one replica in the learner's process does (sampler.backend)."""

    replicas: list[ReplicaConfig] = dataclasses.field(default_factory=list)
    start_timeout_s: float = 600.0
    """For loading the model and compiling its steps; so long may an attached replica be away before the run goes on without it."""
    generate_timeout_s: float = 600.0
    """For one turn; a replica that takes longer is given up and started again."""
    sync_timeout_s: float = 600.0
    """For one replica to stage a version, and to commit it; transfer.timeout_s ends it sooner when nothing arrives."""
    max_restarts: int = 5
    """Of one replica without a version in between, before the run goes on without it."""
    rollout_token: str | None = None
    """Of attached replicas, as file:/path or env:NAME; those that are started get tokens of the run's own."""
    control_token: str | None = None
    ca: str | None = None
    """File of the certificate authority of replicas at https addresses, and of the learner's own store if that has TLS."""
    store_host: str = "127.0.0.1"
    """Under which the learner serves its weights to replicas: an address of its machine that they reach."""
    store_port: int = 0
    store_token: str | None = None
    """As file:/path or env:NAME; attached replicas are started with the same (--store_token). None makes one of the run's own."""
    store_certificate: str | None = None
    """Files of a certificate chain and its key (PEM), to serve weights over TLS."""
    store_key: str | None = None


@dataclasses.dataclass
class TrafficConfig:
    """Online requests replayed against co-serving replicas for as long as a run lasts: a slice of a trace, over and over."""

    trace: str | None = None
    """Of common/traffic/data, or a CSV file of that form. None: no request but those of clients of your own."""
    start_s: float = 0.0
    """The slice, in seconds of the trace as it is stored."""
    end_s: float = 60.0
    time: float = 1.0
    """The time between arrivals and the lengths of prompts and outputs are scaled by these."""
    prompts: float = 1.0
    outputs: float = 1.0
    seed: int = 0


@dataclasses.dataclass
class CoServingConfig:
    """What co-serving replicas serve to online clients, what those are promised, and how much rollouts may delay them."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    """The serving model: a Hugging Face folder, or a random one of the shape it gives."""
    sampler: SamplerConfig = dataclasses.field(
        default_factory=lambda: SamplerConfig(
            max_slots=16,
            max_context_tokens=1024,
            max_step_tokens=256,  # an arrival may have to wait for a whole step
            tokens_per_sequence=1,
            page_tokens=16,
            max_prefill_tiles=16,
        )
    )
    """Its engine. The backend is the replica's; turns and temperatures are the clients' affair."""
    ttft_s: float = 0.5
    """Objectives: time to the first token, and mean time of each token after it."""
    tpot_s: float = 0.15
    spend_slack: bool = True
    """Off: rollouts run only when serving is idle."""
    step_share: float = 0.35
    """Part of the TTFT objective that one rollout step may take: what arrives meanwhile waits for it."""
    max_tpot_rise: float = 50.0
    """A token waits at most this many times the serving step that makes it: bounds how far the median TPOT rises."""
    park_after_s: float = 60.0
    """Without rollouts, until the policy gives up what it holds for running."""
    online_token: str | None = None
    """API key of attached replicas' online clients, as file:/path or env:NAME; those that are started have none."""
    traffic: TrafficConfig = dataclasses.field(default_factory=TrafficConfig)


@dataclasses.dataclass
class EvalConfig:
    """Success on the first `num_tasks` held-out tasks, once sampled at temperature 1 and once greedy."""

    num_tasks: int = 500
    interval: int = 0
    """Versions between evaluations in mid-run on `num_tasks_in_run` tasks; 0: only before and after."""
    num_tasks_in_run: int = 100


@dataclasses.dataclass
class CheckpointConfig:
    """Learner checkpoints under workdir/checkpoints."""

    interval: int = 5
    """Versions between checkpoints."""
    warmup_interval: int = 60
    """Warm-up updates between checkpoints."""
    keep: int = 2


@dataclasses.dataclass
class Config:
    """One run. `seed` determines everything that is drawn."""

    seed: int = 0
    num_versions: int = 50
    """Learner steps: each makes one new weight version from one batch of groups."""
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    env: EnvConfig = dataclasses.field(default_factory=EnvConfig)
    sampler: SamplerConfig = dataclasses.field(default_factory=SamplerConfig)
    warmup: WarmupConfig = dataclasses.field(default_factory=WarmupConfig)
    grpo: GrpoConfig = dataclasses.field(default_factory=GrpoConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    transfer: TransferConfig = dataclasses.field(default_factory=TransferConfig)
    fleet: FleetConfig = dataclasses.field(default_factory=FleetConfig)
    coserving: CoServingConfig = dataclasses.field(default_factory=CoServingConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(section: str, values: object, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        _require(value > 0, f"{section}.{name}={value} must be greater than 0")


def _require_not_negative(section: str, values: object, *names: str) -> None:
    for name in names:
        value = getattr(values, name)
        _require(value >= 0, f"{section}.{name}={value} must not be negative")


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name}={value!r} is unknown; use one of {', '.join(allowed)}")


def _validate_model(model: ModelConfig, mesh: MeshConfig) -> None:
    _require_one_of("model.weights_dtype", model.weights_dtype, DTYPES)
    _require_one_of("model.compute_dtype", model.compute_dtype, DTYPES)
    _require_positive("model", model, "logprob_chunk_tokens")
    _require_positive("mesh", mesh, "fsdp", "tensor")
    if model.checkpoint is not None:
        return  # its own config.json says the shape
    sizes = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "max_position_embeddings")
    _require_positive("model", model, *sizes)
    _require(
        model.num_heads % model.num_kv_heads == 0,
        f"model.num_heads={model.num_heads} is not divisible by model.num_kv_heads={model.num_kv_heads}; "
        "each key-value head serves the same number of query heads",
    )
    _require(model.head_dim % 2 == 0, f"model.head_dim={model.head_dim} must be even: rotary embedding turns pairs")


def _validate_learning(config: Config) -> None:
    grpo, optim, warmup = config.grpo, config.optim, config.warmup
    _require_positive("grpo", grpo, "prompts_per_step", "num_minibatches", "num_epochs", "constant_normalizer", "max_refills")
    _require(grpo.group_size >= 2, f"grpo.group_size={grpo.group_size}: a group needs at least 2 trajectories to compare")
    _require(0 <= grpo.clip_low < 1, f"grpo.clip_low={grpo.clip_low} must lie in [0, 1)")
    _require_not_negative("grpo", grpo, "clip_high", "kl_coef")
    _require_one_of("grpo.aggregation", grpo.aggregation, AGGREGATIONS)
    num_trajectories = grpo.prompts_per_step * grpo.group_size
    parts = grpo.num_minibatches * optim.accumulation_steps * config.mesh.fsdp
    _require_positive("optim", optim, "lr", "max_grad_norm", "accumulation_steps")
    _require(
        num_trajectories % parts == 0,
        f"{num_trajectories} trajectories a step (grpo.prompts_per_step={grpo.prompts_per_step} x group_size={grpo.group_size}) "
        f"are not divisible by {parts} (grpo.num_minibatches={grpo.num_minibatches} x optim.accumulation_steps="
        f"{optim.accumulation_steps} x mesh.fsdp={config.mesh.fsdp}); change one of them",
    )
    _require_one_of("optim.schedule", optim.schedule, ("constant", "linear", "cosine"))
    _require_not_negative("optim", optim, "weight_decay", "lr_warmup_updates")
    for name in ("b1", "b2"):
        value = getattr(optim, name)
        _require(0 <= value < 1, f"optim.{name}={value} must lie in [0, 1)")
    _require_not_negative("warmup", warmup, "num_updates", "validation_interval")
    _require_positive("warmup", warmup, "batch_size", "lr", "num_validation_tasks")
    share = warmup.random_action_share
    _require(0 <= share <= 1, f"warmup.random_action_share={share} must lie in [0, 1]")


def _validate_fleet(config: Config) -> None:
    fleet = config.fleet
    _require_positive("fleet", fleet, "start_timeout_s", "generate_timeout_s", "sync_timeout_s")
    _require_not_negative("fleet", fleet, "max_restarts", "store_port")
    names = [replica.name for replica in fleet.replicas]
    for idx, replica in enumerate(fleet.replicas):
        where = f"fleet.replicas[{idx}]"
        _require(
            replica.name.isidentifier(), f"{where}.name={replica.name!r} must be letters, digits and _, for instance jetstream{idx}"
        )
        _require(names.count(replica.name) == 1, f"{where}.name={replica.name!r} is given to two replicas; each needs its own")
        _require_one_of(f"{where}.backend", replica.backend, BACKENDS)
        _require_positive(where, replica, "tensor_parallel")
        _require(
            replica.backend == "vllm" or replica.tensor_parallel == 1,
            f"{where}.tensor_parallel={replica.tensor_parallel} needs backend='vllm', not {replica.backend!r}",
        )
        _require(
            not replica.coserve or replica.tensor_parallel == 1,
            f"{where}.tensor_parallel={replica.tensor_parallel} is not possible with coserve=True; set it to 1",
        )
        if replica.address is not None:
            _require(
                replica.address.startswith(("http://", "https://")),
                f"{where}.address={replica.address!r} is no address; write http://HOST:PORT",
            )
            _require(
                None not in (fleet.rollout_token, fleet.control_token, fleet.store_token),
                f"{where}.address={replica.address!r} needs fleet.rollout_token, control_token and store_token: what that replica "
                "was started with, as file:/path or env:NAME",
            )
    _require(
        fleet.store_host not in ("", "0.0.0.0", "::"),
        f"fleet.store_host={fleet.store_host!r} is no address that replicas can be told; name one of this machine's",
    )
    _require(
        (fleet.store_certificate is None) == (fleet.store_key is None),
        "fleet.store_certificate and fleet.store_key belong together; give both or neither",
    )


def serving_config(config: Config) -> Config:
    """The configuration of the model that co-serving replicas serve online, as if it were the only one.

    Its seed is another than the policy's: a random model of the same shape is not the same model.
    """
    sampler = dataclasses.replace(config.coserving.sampler, backend=config.sampler.backend)
    return dataclasses.replace(
        config, seed=(config.seed + 1) % 2**31, model=config.coserving.model, sampler=sampler, fleet=FleetConfig()
    )


def validate_coserving(config: Config) -> None:
    """Check what co-serving replicas need. Done by `validate` if the fleet has one.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    coserving, traffic = config.coserving, config.coserving.traffic
    _require_positive("coserving", coserving, "ttft_s", "tpot_s", "park_after_s")
    _require(0 < coserving.step_share <= 1, f"coserving.step_share={coserving.step_share} must lie in (0, 1]")
    _require(coserving.max_tpot_rise >= 1, f"coserving.max_tpot_rise={coserving.max_tpot_rise} must be at least 1")
    _require_positive("coserving.traffic", traffic, "time", "prompts", "outputs")
    _require_not_negative("coserving.traffic", traffic, "start_s", "seed")
    _require(
        traffic.start_s < traffic.end_s,
        f"coserving.traffic.start_s={traffic.start_s} must be below end_s={traffic.end_s}: nothing arrives between them",
    )
    try:
        validate(serving_config(config))
    except ValueError as error:
        raise ValueError(f"of the serving model (these fields of coserving): {error}") from error


def validate(config: Config) -> None:
    """Check a whole configuration once, before anything is built.

    Raises:
        ValueError: names the field, its value and the fix.
    """
    _require_not_negative("config", config, "seed", "num_versions")
    _require(config.seed < 2**31, f"config.seed={config.seed} must be below 2**31")
    _validate_model(config.model, config.mesh)
    _validate_learning(config)
    sampler = config.sampler
    _require_positive(
        "sampler", sampler, "max_slots", "max_context_tokens", "max_step_tokens", "tokens_per_sequence", "max_turn_tokens"
    )
    _require_positive("sampler", sampler, "page_tokens", "max_prefill_tiles", "tensor_parallel")
    _require_one_of("sampler.backend", sampler.backend, BACKENDS)
    for name, default in (("tensor_parallel", 1), ("own_process", False)):
        value = getattr(sampler, name)
        _require(
            sampler.backend == "vllm" or value == default,
            f"sampler.{name}={value} needs sampler.backend='vllm', not {sampler.backend!r}",
        )
    _require(sampler.backend != "vllm" or not sampler.invariant, "sampler.invariant=True needs sampler.backend='jetstream'")
    _require_one_of("sampler.stale_cache", sampler.stale_cache, ("keep", "drop", "tag"))
    _require_not_negative("sampler", sampler, "temperature")
    _require(
        sampler.max_turn_tokens < sampler.max_context_tokens,
        f"sampler.max_turn_tokens={sampler.max_turn_tokens} leaves no room for a prompt in "
        f"sampler.max_context_tokens={sampler.max_context_tokens}",
    )
    if config.model.checkpoint is None:
        _require(
            sampler.max_context_tokens <= config.model.max_position_embeddings,
            f"sampler.max_context_tokens={sampler.max_context_tokens} is above model.max_position_embeddings="
            f"{config.model.max_position_embeddings}; lower the first or raise the second",
        )
    _require_positive("env", config.env, "turn_timeout_s")
    _require_positive("transfer", config.transfer, "anchor_interval", "timeout_s")
    _validate_fleet(config)
    if any(replica.coserve for replica in config.fleet.replicas):
        validate_coserving(config)
    _require_positive("eval", config.eval, "num_tasks", "num_tasks_in_run")
    _require_not_negative("eval", config.eval, "interval")
    _require_positive("checkpoint", config.checkpoint, "interval", "warmup_interval", "keep")
