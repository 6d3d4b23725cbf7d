"""Laws of the learner: same result on every mesh and split, deterministic, silent inside a step, publishes what it trains."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import MeshConfig
from rose_jax.advantages import ScoredTrajectory, score_groups
from rose_jax.batching import Batch, demonstration_batch, rl_batch
from rose_jax.learner import Learner
from rose_jax.mesh import make_mesh
from rose_jax.update import Phase, lower_update, model_logprobs
from tests.rose_jax.training_data import MODEL_CONFIG, groups, new_learner, scored_batch, small_config, trajectory


def _demonstrations() -> Batch:
    return demonstration_batch([trajectory(20 + 3 * idx, seed=idx) for idx in range(8)])


def _host(tree: object) -> object:
    """A copy on the host that nothing on the device can change."""
    return jax.tree.map(np.array, tree)


def _copy(tree: object) -> object:
    return jax.tree.map(jnp.copy, tree)


def _pairs(left: object, right: object) -> list[tuple[str, np.ndarray, np.ndarray]]:
    lefts, rights = (jax.tree_util.tree_leaves_with_path(tree) for tree in (left, right))
    assert [path for path, _ in lefts] == [path for path, _ in rights]
    return [(jax.tree_util.keystr(path), np.asarray(x), np.asarray(y)) for (path, x), (_, y) in zip(lefts, rights, strict=True)]


def _assert_equal(left: object, right: object) -> None:
    for name, ours, theirs in _pairs(left, right):
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


def _assert_same_training(left: tuple[list[dict[str, float]], object], right: tuple[list[dict[str, float]], object]) -> None:
    for name, ours, theirs in _pairs(left[1], right[1]):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=name)
    for ours, theirs in zip(left[0], right[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def _train(learner: Learner) -> tuple[list[dict[str, float]], object]:
    """Two learner steps; returns their metrics and the weights."""
    metrics = [learner.update(scored_batch(seed)) for seed in range(2)]
    return metrics, _host(learner.params)


@pytest.fixture(scope="module")
def compiled_learner() -> Learner:
    """One device, with a reference policy and in the RL phase."""
    return new_learner(small_config(kl_coef=0.1))


@pytest.fixture(scope="module")
def initial(compiled_learner: Learner) -> tuple[object, dict[str, object]]:
    return _copy(compiled_learner.arrays()), compiled_learner.progress()


@pytest.fixture
def learner(compiled_learner: Learner, initial: tuple) -> Iterator[Learner]:
    """The compiled learner, put back to its first state."""
    arrays, progress = initial
    compiled_learner.load(_copy(arrays), progress)
    return compiled_learner


@pytest.mark.parametrize(
    ("fsdp", "tensor"),
    [(4, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in ((8, 1), (2, 4), (1, 8)))],
)
def test_every_mesh_gives_what_one_device_gives(fsdp: int, tensor: int, learner: Learner) -> None:
    on_mesh = new_learner(small_config(kl_coef=0.1), fsdp=fsdp, tensor=tensor)
    _assert_same_training(_train(on_mesh), _train(learner))


def test_accumulation_changes_only_the_rounding(learner: Learner) -> None:
    config = small_config(kl_coef=0.1)
    config.optim.accumulation_steps = 4
    _assert_same_training(_train(new_learner(config)), _train(learner))


def test_same_inputs_give_equal_bits(learner: Learner, initial: tuple) -> None:
    metrics, params = _train(learner)
    learner.load(_copy(initial[0]), initial[1])
    again, params_again = _train(learner)
    assert metrics == again
    _assert_equal(params, params_again)


def test_a_step_moves_nothing_between_host_and_device_unasked(learner: Learner) -> None:
    learner.update(scored_batch())
    with jax.transfer_guard("disallow"):
        learner.update(scored_batch(1))


def test_published_weights_outlive_later_updates(learner: Learner) -> None:
    published = learner.published_params()
    before = _host(published)
    _assert_equal(before, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), _host(learner.params)))
    learner.update(scored_batch())
    _assert_equal(published, before)
    assert any((now != then).any() for _, now, then in _pairs(learner.published_params(), before))


def test_weights_published_in_float32_share_no_memory_with_the_master() -> None:
    config = small_config()
    config.model.weights_dtype = "float32"
    learner = new_learner(config)
    published = learner.published_params()
    _assert_equal(published, learner.params)
    for ours, theirs in zip(jax.tree.leaves(published), jax.tree.leaves(learner.params), strict=True):
        assert ours.unsafe_buffer_pointer() != theirs.unsafe_buffer_pointer()


def _on_policy(learner: Learner, batch: Batch) -> Batch:
    """The batch as if sampled by the published weights."""
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), learner.published_params())
    config = small_config()
    logprobs, _ = model_logprobs(weights, batch, config=config, model_config=MODEL_CONFIG, temperature=1.0)
    masked = np.where(batch.loss_mask, np.asarray(logprobs), 0).astype(np.float32)
    return Batch(
        token_ids=batch.token_ids, loss_mask=batch.loss_mask, behavior_logprobs=masked, advantages=np.asarray(batch.advantages)
    )


def test_the_policy_that_trains_is_the_one_that_is_published(learner: Learner) -> None:
    metrics = learner.update(_on_policy(learner, scored_batch()))
    assert metrics["sampler_gap_max"] < 2e-6
    assert metrics["behavior_gap_max"] > 1e-3  # the second minibatch meets a policy that has moved


def test_updates_raise_what_did_better_than_its_siblings(learner: Learner) -> None:
    batch = _on_policy(learner, scored_batch())
    before = np.asarray(batch.behavior_logprobs)
    for _ in range(3):
        learner.update(batch)
    gain = (np.asarray(_on_policy(learner, batch).behavior_logprobs) - before).sum(axis=1)
    advantages = np.asarray(batch.advantages)
    assert gain[advantages > 0].mean() > 0 > gain[advantages < 0].mean()


def test_the_reference_policy_stays_where_it_was(learner: Learner) -> None:
    reference = _host(learner.arrays()["reference_params"])
    first, second = learner.update(scored_batch()), learner.update(scored_batch(1))
    assert 0 <= first["reference_kl"] < second["reference_kl"]
    _assert_equal(learner.arrays()["reference_params"], reference)


def test_rows_that_are_missing_keep_the_shape(learner: Learner) -> None:
    learner.update(scored_batch())
    compiled = learner._updates[Phase.RL]._cache_size()
    fewer = rl_batch(score_groups(groups()[:3], normalize_std=True))
    assert all(np.isfinite(value) for value in learner.update(fewer).values())
    assert learner._updates[Phase.RL]._cache_size() == compiled


def test_a_gradient_that_is_not_finite_ends_the_run_with_the_numbers(learner: Learner) -> None:
    broken = rl_batch([ScoredTrajectory(trajectory=trajectory(30, seed=seed), advantage=float("inf")) for seed in range(4)])
    with pytest.raises(FloatingPointError, match=r"version 1: loss=.* grad_norm=.*optim.max_grad_norm"):
        learner.update(broken)


def test_warm_up_learns_and_gives_way_to_its_best_weights() -> None:
    config = small_config(kl_coef=0.1)
    config.warmup.num_updates = 20
    learner = new_learner(config)
    batch = _demonstrations()
    first = learner.supervised_eval(batch)
    losses = [learner.supervised_update(batch)["loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(first, rel=1e-6)
    assert losses[-1] < 0.9 * losses[0]
    assert learner.keep_if_best(learner.supervised_eval(batch))
    best = _host(learner.params)
    learner.supervised_update(batch)
    assert not learner.keep_if_best(100.0)
    with pytest.raises(AssertionError, match="start_reinforcement"):
        learner.update(scored_batch())
    learner.start_reinforcement()
    _assert_equal(learner.params, best)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(learner.arrays()["opt_state"]))
    _assert_equal(learner.arrays()["reference_params"], jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), best))
    assert (learner.phase, learner.version, learner.step) == (Phase.RL, 0, 6)
    assert "best_params" not in learner.arrays()


def test_a_reference_policy_that_was_never_kept_is_asked_for_by_name(learner: Learner, initial: tuple) -> None:
    arrays = {name: tree for name, tree in initial[0].items() if name != "reference_params"}
    with pytest.raises(ValueError, match=r"grpo.kl_coef=0.1 needs the reference policy"):
        learner.load(arrays, initial[1])


def test_the_update_lowers_from_shapes_alone() -> None:
    config = small_config(kl_coef=0.1)
    config.optim.accumulation_steps = 2
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    lowered = lower_update(config, MODEL_CONFIG, mesh, num_rows=8, num_tokens=256)
    token_ids = lowered.in_avals[0][2].token_ids
    assert token_ids.shape == (2, 4, 256)
