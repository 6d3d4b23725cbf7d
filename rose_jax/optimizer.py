"""AdamW with schedule and global-norm clipping, built from the configuration for each phase of training.

Both phases give optimizers of the same structure, so that one checkpoint layout holds either state. Weight decay applies to the
matrices of the layers and to an untied output head only: norm scales are gains around 1, and decay would pull embedding rows of
tokens that never occur to zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Int32

from common.config import Config, OptimConfig

Schedule = Callable[[Int32[Array, ""]], Float32[Array, ""]]


def learning_rate_schedule(*, peak: float, shape: str, lr_warmup_updates: int, num_updates: int) -> Schedule:
    """Rate of update number `count` (from 0): linear rise over the first `lr_warmup_updates`, then constant, or a linear or cosine
    fall that would reach zero at update `num_updates`. No update has a rate of zero: it would cost as much as one that learns."""

    def schedule(count: Int32[Array, ""]) -> Float32[Array, ""]:
        done = jnp.asarray(count, jnp.float32)
        rise = jnp.minimum(1.0, (done + 1) / max(1, lr_warmup_updates))
        progress = jnp.clip((done - lr_warmup_updates) / max(1, num_updates - lr_warmup_updates), 0.0, 1.0)
        if shape == "linear":
            fall = 1.0 - progress
        elif shape == "cosine":
            fall = 0.5 * (1.0 + jnp.cos(math.pi * progress))
        else:
            assert shape == "constant", shape
            fall = jnp.ones_like(progress)
        return peak * rise * fall

    return schedule


def rl_schedule(config: Config) -> Schedule:
    """The schedule of optim.lr over all updates of num_versions learner steps."""
    num_updates = config.num_versions * config.grpo.num_minibatches * config.grpo.num_epochs
    optim = config.optim
    return learning_rate_schedule(
        peak=optim.lr, shape=optim.schedule, lr_warmup_updates=optim.lr_warmup_updates, num_updates=num_updates
    )


def warmup_schedule(config: Config) -> Schedule:
    """Cosine from warmup.lr to zero over the supervised updates."""
    warmup = config.warmup
    return learning_rate_schedule(peak=warmup.lr, shape="cosine", lr_warmup_updates=0, num_updates=warmup.num_updates)


def _is_decayed(path: tuple[object, ...], parameter: jax.Array) -> bool:
    return parameter.ndim >= 2 and "embed" not in jax.tree_util.keystr(path)


def make_optimizer(schedule: Schedule, optim: OptimConfig) -> optax.GradientTransformation:
    """Clip the gradient to optim.max_grad_norm by its global norm, then AdamW with `schedule`; its state counts the updates."""
    return optax.chain(
        optax.clip_by_global_norm(optim.max_grad_norm),
        optax.adamw(
            schedule,
            b1=optim.b1,
            b2=optim.b2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            mask=lambda params: jax.tree_util.tree_map_with_path(_is_decayed, params),
        ),
    )
