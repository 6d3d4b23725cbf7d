"""Qwen3 against transformers' Qwen3ForCausalLM, and the properties that training relies on."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from transformers import Qwen3ForCausalLM

from common.config import MeshConfig
from rose_jax.export import params_from_named, save_checkpoint
from rose_jax.mesh import make_mesh, param_shardings, place, tensor_shardings
from rose_jax.models import qwen3
from rose_jax.models.checkpoint_table import hf_name, tensor_entries
from rose_jax.models.qwen3 import (
    Qwen3,
    Qwen3Config,
    abstract_model,
    cast_weights,
    causal_attention,
    create_model,
    sequence_logprobs,
)

TINY = Qwen3Config(
    vocab_size=96,
    hidden_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=96,
    tie_word_embeddings=True,
    rope_theta=1e6,
)
SHAPES = {
    "tied": TINY,
    "untied": dataclasses.replace(TINY, tie_word_embeddings=False),
    "one key-value head": dataclasses.replace(TINY, num_heads=6, num_kv_heads=1, hidden_size=48, rope_theta=1e4),
    "wide heads, odd sizes": dataclasses.replace(TINY, num_heads=3, num_kv_heads=3, head_dim=64, hidden_size=40, vocab_size=101),
    "coarse epsilon, one layer": dataclasses.replace(TINY, num_layers=1, rms_norm_eps=1e-2, tie_word_embeddings=False),
}
TOKENS = np.random.default_rng(0).integers(0, 96, (8, 24), dtype=np.int32)


@functools.cache
def new_params(config: Qwen3Config) -> nnx.State:
    """Random weights drawn without a compiler. Norms too: new ones are all 1, which would hide one that is left out or mixed up."""
    rng = np.random.default_rng(5)
    named = {
        entry.hf_name: rng.normal(size=entry.shape) / np.sqrt(entry.shape[-1])
        if len(entry.shape) > 1
        else rng.uniform(0.5, 1.5, entry.shape)
        for entry in tensor_entries(config)
    }
    return params_from_named(config, {name: array.astype(np.float32) for name, array in named.items()})


def as_model(config: Qwen3Config, params: nnx.State) -> Qwen3:
    return nnx.merge(nnx.graphdef(abstract_model(config)), params)


@functools.partial(jax.jit, static_argnames="config")
def forward(config: Qwen3Config, params: nnx.State, token_ids: jax.Array, temperature: float = 1.0) -> dict[str, jax.Array]:
    model = as_model(config, params)
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1]), token_ids.shape)
    logits = model.logits(model(token_ids, positions, causal_attention))
    logprobs, entropies = sequence_logprobs(model, token_ids, temperature=temperature, chunk_tokens=8 * 9, remat=False)
    return {"logits": logits, "logprobs": logprobs, "entropies": entropies}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_logprobs_equal_transformers(tmp_path: Path, config: Qwen3Config) -> None:
    save_checkpoint(tmp_path / "model", new_params(config), config, dtype="float32")
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(TOKENS).long()).logits
    for temperature in (1.0, 0.7):
        ours = forward(config, new_params(config), TOKENS, temperature)
        np.testing.assert_allclose(ours["logits"], expected.numpy(), atol=1e-4, rtol=0)
        log_softmax = torch.log_softmax(expected[:, :-1].double() / temperature, dim=-1).numpy()
        chosen = np.take_along_axis(log_softmax, TOKENS[:, 1:, None], axis=-1)[..., 0]
        np.testing.assert_allclose(ours["logprobs"][:, 1:], chosen, atol=1e-4, rtol=0)
        np.testing.assert_allclose(ours["entropies"][:, 1:], -(np.exp(log_softmax) * log_softmax).sum(-1), atol=1e-4, rtol=0)
        assert not np.any(ours["logprobs"][:, 0])
        assert not np.any(ours["entropies"][:, 0])


def value_and_grads(
    config: Qwen3Config, params: nnx.State, tokens: np.ndarray | jax.Array, *, chunk_tokens: int, remat: bool
) -> tuple[dict[str, jax.Array], nnx.State]:
    weights = np.random.default_rng(1).normal(size=tokens.shape).astype(np.float32) / tokens.size

    def loss(params: nnx.State, token_ids: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        model = as_model(config, params)
        logprobs, entropies = sequence_logprobs(model, token_ids, chunk_tokens=chunk_tokens, remat=remat)
        return jnp.sum(logprobs * weights) + 0.1 * jnp.mean(entropies), {"logprobs": logprobs, "entropies": entropies}

    grads, values = jax.jit(jax.grad(loss, has_aux=True))(params, tokens)
    return values, grads


@functools.cache
def on_one_device(config: Qwen3Config) -> tuple[dict[str, jax.Array], nnx.State]:
    return value_and_grads(config, new_params(config), TOKENS, chunk_tokens=40, remat=True)


def assert_close(left: object, right: object, *, atol: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=0), left, right)


def test_chunks_and_remat_change_neither_values_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SHAPES["untied"]
    values, grads = on_one_device(config)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads)) > 1e-3
    whole_values, whole_grads = value_and_grads(config, new_params(config), TOKENS, chunk_tokens=1000, remat=False)
    assert_close(whole_values, values, atol=1e-5)
    assert_close(whole_grads, grads, atol=1e-6)
    monkeypatch.setattr(qwen3, "ATTENTION_QUERY_CHUNK", 7)  # does not divide 24
    cut_values, cut_grads = value_and_grads(config, new_params(config), TOKENS, chunk_tokens=1, remat=False)
    assert_close(cut_values, values, atol=1e-5)
    assert_close(cut_grads, grads, atol=1e-6)


def live_bytes(text: str, *, min_elements: int) -> list[str]:
    """Shapes in a compiled program that have at least this many elements."""
    shapes = set(re.findall(r"\b(?:f32|bf16|pred|s32|f64)\[([\d,]+)\]", text))
    return sorted(shape for shape in shapes if np.prod([int(size) for size in shape.split(",")]) >= min_elements)


def test_no_array_of_vocabulary_times_time_or_time_squared_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen3, "ATTENTION_QUERY_CHUNK", 32)
    config = dataclasses.replace(TINY, vocab_size=1024, num_layers=1)
    graph, params = nnx.split(abstract_model(config))
    token_ids = jax.ShapeDtypeStruct((1, 512), jnp.int32)

    def largest(chunk_tokens: int) -> list[str]:
        def loss(params: nnx.State, token_ids: jax.Array) -> jax.Array:
            logprobs, entropies = sequence_logprobs(nnx.merge(graph, params), token_ids, chunk_tokens=chunk_tokens, remat=True)
            return logprobs.sum() + entropies.sum()

        return live_bytes(jax.jit(jax.grad(loss)).lower(params, token_ids).compile().as_text(), min_elements=512 * 512)

    assert any("1024" in shape.split(",") for shape in largest(512)), "the check must see whole logits where they exist"
    assert largest(64) == []


def test_a_token_never_sees_what_comes_after_it() -> None:
    changed = TOKENS.copy()
    changed[:, 15:] = 1
    before, after = (forward(TINY, new_params(TINY), tokens)["logits"][:, :15] for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before, after)


def test_attending_through_a_cache_token_by_token_equals_the_whole_sequence() -> None:
    @jax.jit
    def step(token_ids: jax.Array, position: jax.Array, caches: list) -> tuple[jax.Array, list]:
        caches = list(caches)

        def attend(layer_idx: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            keys, values = (
                jax.lax.dynamic_update_slice_in_dim(cache, new, position, axis=1)
                for cache, new in zip(caches[layer_idx], (k, v), strict=True)
            )
            caches[layer_idx] = (keys, values)
            return qwen3.attend_block(q.reshape(8, 1, 4, 2, 16), keys, values, position).reshape(q.shape)

        model = as_model(TINY, new_params(TINY))
        return model.logits(model(token_ids, jnp.full((8, 1), position), attend)), caches

    caches = [(jnp.zeros((8, 6, 4, 16)),) * 2] * 2
    steps = []
    for position in range(6):
        logits, caches = step(TOKENS[:, position : position + 1], position, caches)
        steps.append(logits)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), forward(TINY, new_params(TINY), TOKENS)["logits"][:, :6], atol=1e-5)


def test_cast_weights_shows_the_published_values_and_passes_gradients_straight_through() -> None:
    params = new_params(TINY)

    @jax.jit
    def cast(params: nnx.State) -> nnx.State:
        return cast_weights(params, weights_dtype="bfloat16", compute_dtype="float32")

    published = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    seen = cast(params)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, np.asarray(y, np.float32)), seen, published)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(seen))

    def loss(params: nnx.State) -> jax.Array:
        cast_params = cast_weights(params, weights_dtype="bfloat16", compute_dtype="float32")
        return sum(jnp.sum(leaf * 1.001) for leaf in jax.tree.leaves(cast_params))

    jax.tree.map(lambda grad: np.testing.assert_array_equal(grad, np.float32(1.001)), jax.jit(jax.grad(loss))(params))
    halves = cast_weights(params, weights_dtype="bfloat16", compute_dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, halves, published)
    kept = cast_weights(params, weights_dtype="float32", compute_dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, kept, params)


@given(st.floats(width=32, allow_nan=False))
@settings(max_examples=200, deadline=None)
def test_rounding_equals_numpys_bfloat16_bit_for_bit(value: float) -> None:
    if 0 < abs(value) < np.finfo(np.float32).tiny:
        return  # XLA flushes subnormals to zero
    rounded = qwen3.round_to_bfloat16(jnp.float32(value))
    expected = np.asarray(np.float32(value)).astype(jnp.bfloat16).astype(np.float32)
    assert np.asarray(rounded).tobytes() == expected.tobytes()


def test_the_model_computes_in_the_dtype_of_its_parameters() -> None:
    half = cast_weights(new_params(TINY), weights_dtype="bfloat16", compute_dtype="bfloat16")
    hidden = jax.eval_shape(lambda: as_model(TINY, half)(TOKENS, TOKENS, causal_attention))
    assert hidden.dtype == jnp.bfloat16
    logits = forward(TINY, half, TOKENS)["logits"]
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, forward(TINY, new_params(TINY), TOKENS)["logits"], atol=0.15)


@pytest.mark.parametrize("tied", [True, False])
def test_table_and_model_name_the_same_parameters_and_shapes(tied: bool) -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=tied)
    shapes = {path: variable.get_value().shape for path, variable in nnx.to_flat_state(nnx.state(abstract_model(config)))}
    assert shapes == {entry.path: entry.shape for entry in tensor_entries(config)}
    assert all(hf_name(entry.path) == entry.hf_name for entry in tensor_entries(config))


def test_new_weights_depend_on_the_seed_alone_and_are_made_in_their_shards() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=4))
    config = dataclasses.replace(TINY, num_layers=1)
    plain, sharded = (create_model(config, seed=3, embedding_init_std=0.125, mesh=where) for where in (None, mesh))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(plain), nnx.state(sharded))
    shardings = tensor_shardings(config, mesh)
    for path, variable in nnx.to_flat_state(nnx.state(sharded)):
        assert variable[...].sharding.is_equivalent_to(shardings[path], variable[...].ndim), path
    other = create_model(config, seed=4, embedding_init_std=0.125)
    assert not np.array_equal(other.embed_tokens[...], plain.embed_tokens[...])
    assert float(jnp.std(plain.embed_tokens[...])) == pytest.approx(0.125, rel=0.05)


MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]
CASES = [("untied", *mesh) for mesh in MESHES] + [pytest.param("tied", *mesh, marks=pytest.mark.slow) for mesh in MESHES]


@pytest.mark.parametrize(("name", "fsdp", "tensor"), CASES)
def test_a_mesh_of_eight_devices_gives_what_one_gives(name: str, fsdp: int, tensor: int) -> None:
    config = SHAPES[name]
    mesh = make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor))
    params = jax.device_put(new_params(config), param_shardings(config, new_params(config), mesh))
    values, grads = on_one_device(config)
    tokens = place(TOKENS, NamedSharding(mesh, PartitionSpec("fsdp")))
    with jax.set_mesh(mesh):
        mesh_values, mesh_grads = value_and_grads(config, params, tokens, chunk_tokens=40, remat=True)
    assert_close(mesh_values, values, atol=1e-5)
    assert_close(mesh_grads, grads, atol=1e-6)
