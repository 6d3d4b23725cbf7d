"""One optimizer update as a pure function, its compiled form on a mesh, and the shapes it works on.

Every forward pass, also that of gradients, goes through `cast_weights`: the policy that is trained is the one that is published,
rounding included. Gradients of micro-batches are summed in float32; since losses divide by the whole minibatch's counts, how many
there are changes only the rounding. Everything can be lowered from shapes alone, so a large model is compiled without its weights.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from common.config import Config
from rose_jax.batching import Batch
from rose_jax.losses import BatchTotals, LossMetrics, batch_totals, grpo_loss, supervised_loss
from rose_jax.mesh import param_shardings
from rose_jax.models.checkpoint_table import FSDP_AXIS
from rose_jax.models.qwen3 import abstract_model, cast_weights, sequence_logprobs
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.optimizer import make_optimizer, rl_schedule, warmup_schedule


class Phase(enum.StrEnum):
    """What the optimizer state belongs to."""

    WARMUP = "warmup"
    RL = "rl"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainState:
    """What an update consumes and produces; params are float32. `num_updates` counts within the phase."""

    params: nnx.State
    opt_state: optax.OptState
    num_updates: Array


UpdateFn = Callable[[TrainState, nnx.State | None, Batch], tuple[TrainState, LossMetrics]]


def model_logprobs(
    weights: nnx.State, batch: Batch, *, config: Config, model_config: Qwen3Config, temperature: float
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """Log-probabilities and entropies under weights that went through `cast_weights`."""
    graph, _ = nnx.split(abstract_model(model_config))
    return sequence_logprobs(
        nnx.merge(graph, weights),
        jnp.asarray(batch.token_ids),
        temperature=temperature,
        chunk_tokens=config.model.logprob_chunk_tokens,
        remat=config.model.remat,
    )


def cast_params(params: nnx.State, config: Config) -> nnx.State:
    """Master weights as published, in the dtype of computation: what every forward pass sees."""
    return cast_weights(params, weights_dtype=config.model.weights_dtype, compute_dtype=config.model.compute_dtype)


def _sum_over_micro_batches(
    value_and_grad: Callable[[Batch], tuple[LossMetrics, nnx.State]], batch: Batch
) -> tuple[LossMetrics, nnx.State]:
    """Metrics and float32 gradients of all micro-batches (leading axis) together, one at a time in memory."""

    def part(micro: Batch) -> tuple[LossMetrics, nnx.State]:
        metrics, grads = value_and_grad(micro)
        return metrics, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)

    first, *_ = jax.tree.leaves(batch)
    if first.shape[0] == 1:
        return part(jax.tree.map(lambda leaf: leaf[0], batch))

    def add(total: tuple[LossMetrics, nnx.State], micro: Batch) -> tuple[tuple[LossMetrics, nnx.State], None]:
        (metrics, grads), (more, more_grads) = total, part(micro)
        sums = jax.tree.map(jnp.add, metrics.sums, more.sums)
        maxima = jax.tree.map(jnp.maximum, metrics.maxima, more.maxima)
        return (LossMetrics(sums=sums, maxima=maxima), jax.tree.map(jnp.add, grads, more_grads)), None

    shapes = jax.eval_shape(part, jax.tree.map(lambda leaf: leaf[0], batch))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, _ = jax.lax.scan(add, zeros, batch)
    return total


def make_update_fn(phase: Phase, config: Config, model_config: Qwen3Config) -> UpdateFn:
    """One optimizer update on one minibatch of micro-batches, as a pure function: (state, reference params, batch) -> state."""
    schedule = rl_schedule(config) if phase is Phase.RL else warmup_schedule(config)
    optimizer = make_optimizer(schedule, config.optim)
    # Greedy decoding records log-probabilities at temperature 1, see SamplingParams.
    temperature = (config.sampler.temperature or 1.0) if phase is Phase.RL else 1.0

    def logprobs_of(weights: nnx.State, micro: Batch) -> tuple[Array, Array]:
        return model_logprobs(weights, micro, config=config, model_config=model_config, temperature=temperature)

    def loss_of(weights: nnx.State, reference: nnx.State | None, micro: Batch, totals: BatchTotals) -> tuple[Array, LossMetrics]:
        logprobs, entropy = logprobs_of(weights, micro)
        if phase is Phase.WARMUP:
            return supervised_loss(logprobs, entropy, micro, totals)
        reference_logprobs = None if reference is None else logprobs_of(reference, micro)[0]
        return grpo_loss(logprobs, entropy, micro, totals, config.grpo, reference_logprobs=reference_logprobs)

    def update(state: TrainState, reference_params: nnx.State | None, batch: Batch) -> tuple[TrainState, LossMetrics]:
        totals = batch_totals(jnp.asarray(batch.loss_mask))
        weights = cast_params(state.params, config)
        reference = None if reference_params is None else cast_params(reference_params, config)

        def value_and_grad(micro: Batch) -> tuple[LossMetrics, nnx.State]:
            # With respect to the rounded weights: rounding has no useful derivative, the master weights get the same gradient.
            grads, metrics = jax.grad(loss_of, has_aux=True)(weights, reference, micro, totals)
            return metrics, grads

        metrics, grads = _sum_over_micro_batches(value_and_grad, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        sums = metrics.sums | {"grad_norm": optax.global_norm(grads), "learning_rate": schedule(state.num_updates)}
        new_state = TrainState(params=params, opt_state=opt_state, num_updates=state.num_updates + 1)
        return new_state, LossMetrics(sums=sums, maxima=metrics.maxima)

    return update


def abstract_state(config: Config, model_config: Qwen3Config, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of a learner's state; both phases have the same."""
    _, params = nnx.split(abstract_model(model_config))
    shardings = param_shardings(model_config, params, mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    optimizer = make_optimizer(rl_schedule(config), config.optim)

    def shape(leaf: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return TrainState(
        params=jax.tree.map(shape, params, shardings),
        opt_state=optax.tree_utils.tree_map_params(
            optimizer,
            shape,
            jax.eval_shape(optimizer.init, params),
            shardings,
            transform_non_params=lambda leaf: shape(leaf, replicated),
        ),
        num_updates=shape(np.int32(0), replicated),
    )


def batch_shardings(mesh: Mesh) -> Batch:
    """Rows of each micro-batch over fsdp; the accumulation axis and time are whole."""
    rows = NamedSharding(mesh, PartitionSpec(None, FSDP_AXIS))
    return Batch(token_ids=rows, loss_mask=rows, behavior_logprobs=rows, advantages=rows)  # type: ignore[arg-type]


def abstract_batch(mesh: Mesh, *, accumulation_steps: int, num_rows: int, num_tokens: int) -> Batch:
    """The shape of one minibatch of `num_rows` rows, all micro-batches together."""
    rows = (accumulation_steps, num_rows // accumulation_steps)
    tokens = (*rows, num_tokens)
    shapes = ((tokens, jnp.int32), (tokens, jnp.bool_), (tokens, jnp.float32), (rows, jnp.float32))
    leaves, structure = jax.tree.flatten(batch_shardings(mesh))
    structs = [jax.ShapeDtypeStruct(dims, dtype, sharding=sharding) for (dims, dtype), sharding in zip(shapes, leaves, strict=True)]
    return jax.tree.unflatten(structure, structs)


def jit_update(phase: Phase, config: Config, model_config: Qwen3Config, mesh: Mesh) -> jax.stages.Wrapped:
    """The update compiled for a mesh, with the state donated. Call or lower it under `jax.set_mesh(mesh)`."""
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, model_config, mesh))
    replicated = NamedSharding(mesh, PartitionSpec())
    return jax.jit(make_update_fn(phase, config, model_config), donate_argnums=0, out_shardings=(state_shardings, replicated))


def lower_update(
    config: Config, model_config: Qwen3Config, mesh: Mesh, *, num_rows: int, num_tokens: int, phase: Phase = Phase.RL
) -> jax.stages.Lowered:
    """Lower one update of num_rows x num_tokens from shapes alone, without a weight in memory; `.compile()` may follow."""
    state = abstract_state(config, model_config, mesh)
    reference = abstract_published(config, state.params) if phase is Phase.RL and config.grpo.kl_coef > 0 else None
    batch = abstract_batch(mesh, accumulation_steps=config.optim.accumulation_steps, num_rows=num_rows, num_tokens=num_tokens)
    with jax.set_mesh(mesh):
        return jit_update(phase, config, model_config, mesh).lower(state, reference, batch)


def abstract_published(config: Config, params: nnx.State) -> nnx.State:
    """The shapes of `params` in the dtype that is published."""
    dtype = jnp.dtype(config.model.weights_dtype)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), params)
