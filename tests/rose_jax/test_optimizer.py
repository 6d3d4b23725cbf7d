"""Schedules hit their corner points, and one update is AdamW on the clipped gradient."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from common.config import Config, OptimConfig
from rose_jax.optimizer import learning_rate_schedule, make_optimizer, rl_schedule, warmup_schedule


def _rates(shape: str, *, lr_warmup_updates: int = 0, num_updates: int = 10) -> list[float]:
    schedule = learning_rate_schedule(peak=1.0, shape=shape, lr_warmup_updates=lr_warmup_updates, num_updates=num_updates)
    return [float(schedule(jnp.int32(count))) for count in range(num_updates)]


def test_a_constant_schedule_is_constant_after_its_rise() -> None:
    assert _rates("constant", lr_warmup_updates=4) == pytest.approx([0.25, 0.5, 0.75] + [1.0] * 7)


def test_a_linear_schedule_falls_to_one_share_before_zero() -> None:
    assert _rates("linear") == pytest.approx([1 - count / 10 for count in range(10)])


def test_a_cosine_schedule_starts_at_the_peak_and_passes_half_in_the_middle() -> None:
    rates = _rates("cosine")
    assert rates[0] == pytest.approx(1.0)
    assert rates[5] == pytest.approx(0.5)
    assert min(rates) > 0


def test_no_update_of_either_phase_has_a_rate_of_zero() -> None:
    config = Config(num_versions=3)
    config.optim.schedule = "linear"
    config.optim.lr_warmup_updates = 2
    num_updates = 3 * config.grpo.num_minibatches * config.grpo.num_epochs
    assert min(float(rl_schedule(config)(jnp.int32(count))) for count in range(num_updates)) > 0
    warmup = [float(warmup_schedule(config)(jnp.int32(count))) for count in range(config.warmup.num_updates)]
    assert min(warmup) > 0
    assert warmup[0] == pytest.approx(config.warmup.lr)


def test_two_updates_equal_adamw_written_out() -> None:
    optim = OptimConfig(b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.1, max_grad_norm=1.0)
    optimizer = make_optimizer(lambda count: 0.1 * (count + 1), optim)
    names = ("embed_tokens", "proj", "norm")
    params = {"embed_tokens": jnp.full((2, 2), 2.0), "proj": jnp.full((2, 2), 3.0), "norm": jnp.full((2,), 4.0)}
    expected = {name: np.asarray(params[name], np.float64) for name in names}
    mean = {name: 0.0 for name in names}
    square = {name: 0.0 for name in names}
    state = optimizer.init(params)
    for count, size in enumerate((0.1, 5.0)):  # the second gradient is above the norm
        grads = {name: size * jnp.arange(1.0, 1 + params[name].size).reshape(params[name].shape) for name in names}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum(float((np.asarray(grad, np.float64) ** 2).sum()) for grad in grads.values()))
        for name in names:
            grad = np.asarray(grads[name], np.float64) * min(1.0, 1.0 / norm)
            mean[name] = 0.8 * mean[name] + 0.2 * grad
            square[name] = 0.9 * square[name] + 0.1 * grad**2
            step = mean[name] / (1 - 0.8 ** (count + 1)) / (np.sqrt(square[name] / (1 - 0.9 ** (count + 1))) + 1e-3)
            decay = 0.1 * expected[name] if name == "proj" else 0.0
            expected[name] = expected[name] - 0.1 * (count + 1) * (step + decay)
    for name in names:
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, err_msg=name)
