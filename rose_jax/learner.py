"""The learner: float32 master weights, their optimizer, and the steps that turn batches into weight versions.

A run has two phases: supervised updates on demonstrations, then learner steps of reinforcement learning, each of which runs the
jitted update over all minibatches and epochs and makes one new version. Nothing inside a step waits for the device: metrics are
fetched when the step is over.

It draws no samples, reads no files and owns no loop. Its whole state goes out by `arrays` and `progress` and comes back by `load`;
what `published_params` gave out stays valid and unchanged whatever the learner does next.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.config import Config
from rose_jax.batching import Batch, micro_batches, minibatches
from rose_jax.losses import LossMetrics, batch_totals, supervised_loss
from rose_jax.mesh import param_shardings, place
from rose_jax.models.checkpoint_table import FSDP_AXIS
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.optimizer import make_optimizer, rl_schedule
from rose_jax.update import (
    Phase,
    TrainState,
    abstract_published,
    abstract_state,
    batch_shardings,
    cast_params,
    jit_update,
    model_logprobs,
)

PARAMS, OPT_STATE, NUM_UPDATES = "params", "opt_state", "num_updates"
BEST_PARAMS, REFERENCE_PARAMS = "best_params", "reference_params"


def _mean_metrics(per_update: Sequence[LossMetrics]) -> dict[str, float]:
    """Fetch the metrics of a step's updates: means of the sums, largest of the maxima."""
    fetched = jax.device_get(list(per_update))
    means = {name: float(np.mean([metrics.sums[name] for metrics in fetched])) for name in fetched[0].sums}
    largest = {name: float(np.max([metrics.maxima[name] for metrics in fetched])) for name in fetched[0].maxima}
    return means | largest


class Learner:
    """See the module. One object per process; under jax.distributed all processes make the same calls with the same batches."""

    def __init__(self, config: Config, model_config: Qwen3Config, mesh: Mesh, params: nnx.State) -> None:
        """Start at version 0, in the warm-up phase if there is one.

        Args:
            params: float32, on any devices. The learner owns them from here on: the first update frees their memory.
        """
        self._config, self._model_config, self._mesh = config, model_config, mesh
        self._abstract = abstract_state(config, model_config, mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        with jax.set_mesh(mesh):
            self._init_opt_state = jax.jit(
                make_optimizer(rl_schedule(config), config.optim).init, out_shardings=shardings.opt_state
            )
        self._updates = {phase: jit_update(phase, config, model_config, mesh) for phase in Phase}
        self._evaluate = jax.jit(functools.partial(_supervised_nll, config=config, model_config=model_config))
        self._publish = jax.jit(
            functools.partial(jax.tree.map, functools.partial(_publish_copy, config=config)), out_shardings=shardings.params
        )
        self._copy = jax.jit(functools.partial(jax.tree.map, jnp.copy), out_shardings=shardings.params)
        self.version = 0
        self.num_warmup_updates = 0
        self.best_validation_loss: float | None = None
        self._best_params: nnx.State | None = None
        self._reference_params: nnx.State | None = None
        self._state = self._fresh_state(jax.device_put(params, param_shardings(model_config, params, mesh)))
        self.phase = Phase.WARMUP
        if config.warmup.num_updates == 0:
            self.start_reinforcement()

    def _fresh_state(self, params: nnx.State) -> TrainState:
        zero = place(np.int32(0), self._abstract.num_updates.sharding)
        with jax.set_mesh(self._mesh):
            return TrainState(params=params, opt_state=self._init_opt_state(params), num_updates=zero)

    @property
    def params(self) -> nnx.State:
        """The float32 master weights; valid until the next update, which frees them."""
        return self._state.params

    @property
    def step(self) -> int:
        """Warm-up updates plus versions: grows by one with each piece of work, so it numbers checkpoints."""
        return self.num_warmup_updates + self.version

    def _place_batch(self, batch: Batch, accumulation_steps: int) -> Batch:
        parts = micro_batches(batch, accumulation_steps=accumulation_steps, row_multiple=self._mesh.shape[FSDP_AXIS])
        return jax.tree.map(place, parts, batch_shardings(self._mesh))

    def _run_update(self, minibatch: Batch) -> LossMetrics:
        placed = self._place_batch(minibatch, self._config.optim.accumulation_steps)
        with jax.set_mesh(self._mesh):
            self._state, metrics = self._updates[self.phase](self._state, self._reference_params, placed)
        return metrics

    def _checked(self, metrics: dict[str, float], what: str) -> dict[str, float]:
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            raise FloatingPointError(
                f"{what}: loss={metrics['loss']} grad_norm={metrics['grad_norm']} at learning rate {metrics['learning_rate']:.3g}; "
                "the weights are lost. Go on from the last checkpoint with a lower rate or a smaller optim.max_grad_norm"
            )
        return metrics

    def supervised_update(self, batch: Batch) -> dict[str, float]:
        """One update towards demonstrations. Blocks until it is done.

        Raises:
            FloatingPointError: loss or gradient is not finite.
        """
        assert self.phase is Phase.WARMUP, "the warm-up is over"
        metrics = _mean_metrics([self._run_update(batch)])
        self.num_warmup_updates += 1
        return self._checked(metrics, f"warm-up update {self.num_warmup_updates}")

    def supervised_eval(self, batch: Batch) -> float:
        """Mean negative log-likelihood per token on demonstrations, under the weights as published. Changes nothing."""
        placed = self._place_batch(batch, 1)
        with jax.set_mesh(self._mesh):
            return float(jax.device_get(self._evaluate(self._state.params, placed)))

    def keep_if_best(self, validation_loss: float) -> bool:
        """Remember the present weights if their validation loss is the lowest so far; `start_reinforcement` goes back to them."""
        assert self.phase is Phase.WARMUP, "the warm-up is over"
        if self.best_validation_loss is not None and validation_loss >= self.best_validation_loss:
            return False
        self.best_validation_loss = validation_loss
        self._best_params = self._copy(self._state.params)
        return True

    def start_reinforcement(self) -> None:
        """End the warm-up: take the best weights if any were kept, forget the optimizer's moments, fix the reference policy."""
        assert self.phase is Phase.WARMUP, "reinforcement learning has started already"
        params = self._state.params if self._best_params is None else self._best_params
        self._best_params = None
        self.phase = Phase.RL
        self._state = self._fresh_state(params)
        if self._config.grpo.kl_coef > 0:
            self._reference_params = self.published_params()

    def update(self, batch: Batch) -> dict[str, float]:
        """One learner step: all epochs and minibatches of `batch`, then one new version. Blocks until it is done.

        The metrics are means over the step's updates (maxima for *_max). sampler_gap_mean and sampler_gap_max are those of
        behavior_gap_* in the first update, where the policy has not moved yet: with fresh samples they show how far sampler and
        learner disagree on the same weights.

        Raises:
            ValueError: more rows than the configuration has trajectories a step.
            FloatingPointError: loss or gradient is not finite.
        """
        assert self.phase is Phase.RL, "call start_reinforcement first"
        grpo = self._config.grpo
        per_update = [
            self._run_update(minibatch)
            for epoch_idx in range(grpo.num_epochs)
            for minibatch in minibatches(
                batch,
                num_minibatches=grpo.num_minibatches,
                num_rows=grpo.prompts_per_step * grpo.group_size,
                seed=self._config.seed,
                version=self.version,
                epoch_idx=epoch_idx,
            )
        ]
        self.version += 1
        first = _mean_metrics(per_update[:1])
        gaps = {f"sampler_gap_{kind}": first[f"behavior_gap_{kind}"] for kind in ("mean", "max")}
        return self._checked(_mean_metrics(per_update) | gaps, f"version {self.version}")

    def published_params(self) -> nnx.State:
        """The weights as the sampler gets them, in model.weights_dtype: a copy that later updates neither free nor change."""
        return self._publish(self._state.params)

    def arrays(self) -> dict[str, Any]:
        """All device state by item name. Valid until the next update: save it, or copy it, before going on."""
        items = {PARAMS: self._state.params, OPT_STATE: self._state.opt_state, NUM_UPDATES: self._state.num_updates}
        optional = {BEST_PARAMS: self._best_params, REFERENCE_PARAMS: self._reference_params}
        return items | {name: params for name, params in optional.items() if params is not None}

    def abstract_arrays(self) -> dict[str, Any]:
        """Shape, dtype and sharding of every item that `arrays` may hold, on this learner's mesh."""
        state = self._abstract
        return {
            PARAMS: state.params,
            OPT_STATE: state.opt_state,
            NUM_UPDATES: state.num_updates,
            BEST_PARAMS: state.params,
            REFERENCE_PARAMS: abstract_published(self._config, state.params),
        }

    def progress(self) -> dict[str, Any]:
        """The host state, as values that JSON keeps exactly."""
        return {
            "phase": str(self.phase),
            "version": self.version,
            "num_warmup_updates": self.num_warmup_updates,
            "best_validation_loss": self.best_validation_loss,
        }

    def load(self, arrays: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Go on from what `arrays` and `progress` gave; owns the arrays from here on.

        Raises:
            ValueError: the reference policy that grpo.kl_coef > 0 needs was not kept.
        """
        phase = Phase(progress["phase"])
        if phase is Phase.RL and self._config.grpo.kl_coef > 0 and REFERENCE_PARAMS not in arrays:
            raise ValueError(
                f"grpo.kl_coef={self._config.grpo.kl_coef} needs the reference policy, but this run was started with "
                "grpo.kl_coef=0 and kept none; set it to 0 again or start anew in another --workdir"
            )
        self.phase = phase
        self.version = progress["version"]
        self.num_warmup_updates = progress["num_warmup_updates"]
        self.best_validation_loss = progress["best_validation_loss"]
        self._state = TrainState(params=arrays[PARAMS], opt_state=arrays[OPT_STATE], num_updates=arrays[NUM_UPDATES])
        self._best_params = arrays.get(BEST_PARAMS)
        keeps_reference = self._config.grpo.kl_coef > 0
        self._reference_params = arrays.get(REFERENCE_PARAMS) if keeps_reference else None


def _supervised_nll(params: nnx.State, batch: Batch, *, config: Config, model_config: Qwen3Config) -> jax.Array:
    rows = jax.tree.map(lambda leaf: leaf[0], batch)
    weights = cast_params(params, config)
    logprobs, entropy = model_logprobs(weights, rows, config=config, model_config=model_config, temperature=1.0)
    return supervised_loss(logprobs, entropy, rows, batch_totals(rows.loss_mask))[0]


def _publish_copy(master: jax.Array, *, config: Config) -> jax.Array:
    # An explicit copy: jit may return an unchanged argument's own buffer, which the next update donates.
    return jnp.copy(master.astype(config.model.weights_dtype))
