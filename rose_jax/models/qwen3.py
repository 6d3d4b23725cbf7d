"""Qwen3 (dense) in Flax NNX: grouped-query attention with q/k norm and RoPE, SwiGLU, tied or untied head.

One forward pass serves training and generation: the caller passes `attend`, which says what a layer's queries look at. The model
computes in the dtype of its parameters; norms, rotary angles, softmax and logits are float32. Parameters keep the names, shapes and
orientation ([out, in]) of the Hugging Face checkpoint, see checkpoint_table.py. It refuses nothing by itself and keeps no cache.

Invariant: in float32 logits and log-probabilities equal those of transformers' Qwen3ForCausalLM to 1e-4. Architecture: Qwen3
Technical Report, arXiv 2505.09388, section 2; rotary embedding in the half-split form: arXiv 2104.09864, section 3.4.2.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, Int

from rose_jax.mesh import constrain, param_shardings
from rose_jax.models.checkpoint_table import FSDP_AXIS, TENSOR_AXIS
from rose_jax.models.qwen3_config import Qwen3Config

Attend = Callable[[int, Array, Array, Array], Array]
"""attend(layer_idx, q [B T H d], k [B T K d], v [B T K d]) -> [B T H d], q and k after norm and RoPE. It may keep k and v."""

ATTENTION_QUERY_CHUNK = 512
"""Queries whose scores exist at a time. Whole scores of one head at T = 32,768 would be 4 GB in float32; so they are 64 MB."""


def rms_norm(x: Float[Array, "... D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "... D"]:
    """Root-mean-square normalisation, computed in float32."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


RopeAngles = tuple[Float32[Array, "B T 1 h"], Float32[Array, "B T 1 h"]]


def rope_angles(positions: Int[Array, "B T"], head_dim: int, theta: float) -> RopeAngles:
    """Cosine and sine of the rotary angle of each position and pair (h = head_dim / 2)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: Float[Array, "B T H d"], rope: RopeAngles) -> Float[Array, "B T H d"]:
    """Turn each pair (x[i], x[i + d/2]) by its angle."""
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _linear(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float[Array, "... O"]:
    return jnp.einsum("...i,oi->...o", x, weight)


def attend_block(q: Array, k: Array, v: Array, first_query_idx: Array | int) -> Array:
    """Queries [B Q K G d] at first_query_idx, first_query_idx + 1, ... over all keys [B T K d] up to their own."""
    scores = jnp.einsum("bqkgd,btkd->bkgqt", q, k, preferred_element_type=jnp.float32) * (q.shape[-1] ** -0.5)
    query_idx = first_query_idx + jnp.arange(q.shape[1])
    visible = jnp.arange(k.shape[1])[None, :] <= query_idx[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bkgqt,btkd->bqkgd", weights, v)


def causal_attention(
    layer_idx: int, q: Float[Array, "B T H d"], k: Float[Array, "B T K d"], v: Float[Array, "B T K d"]
) -> Float[Array, "B T H d"]:
    """Attention over whole sequences from position 0, softmax in float32. Padding on the right needs no mask.

    Long sequences go through in chunks of queries, recomputed in the backward pass: T x T scores never exist whole.
    """
    del layer_idx
    batch, length, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    q = q.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    if length <= ATTENTION_QUERY_CHUNK:
        return attend_block(q, k, v, 0).reshape(batch, length, num_heads, head_dim)
    num_chunks = -(-length // ATTENTION_QUERY_CHUNK)
    padded_length = num_chunks * ATTENTION_QUERY_CHUNK
    q = jnp.pad(q, ((0, 0), (0, padded_length - length), (0, 0), (0, 0), (0, 0)))
    chunks = jnp.moveaxis(q.reshape(batch, num_chunks, ATTENTION_QUERY_CHUNK, *q.shape[2:]), 1, 0)

    @jax.checkpoint
    def attend_chunk(inputs: tuple[Array, Array]) -> Array:
        chunk, first_query_idx = inputs
        return attend_block(chunk, k, v, first_query_idx)

    out = jax.lax.map(attend_chunk, (chunks, jnp.arange(num_chunks) * ATTENTION_QUERY_CHUNK))
    return jnp.moveaxis(out, 0, 1).reshape(batch, padded_length, num_heads, head_dim)[:, :length]


def shard_residual(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Between layers cut time over the tensor axis too, so that what remat keeps is divided by all devices.

    Sequence parallelism, arXiv 2205.05198, section 4.2.2: the same traffic as whole activations, in two halves.
    """
    return constrain(x, FSDP_AXIS, TENSOR_AXIS, None)


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> nnx.Param:
    return nnx.Param((std * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype))


class Attention(nnx.Module):
    """Grouped-query attention; what the queries look at is the caller's `attend`."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> None:
        self.config = config
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden = config.hidden_size
        self.q_proj = _normal(rngs, (query_size, hidden), hidden**-0.5, param_dtype)
        self.k_proj = _normal(rngs, (kv_size, hidden), hidden**-0.5, param_dtype)
        self.v_proj = _normal(rngs, (kv_size, hidden), hidden**-0.5, param_dtype)
        self.o_proj = _normal(rngs, (hidden, query_size), (2 * config.num_layers * query_size) ** -0.5, param_dtype)
        self.q_norm = nnx.Param(jnp.ones(config.head_dim, param_dtype))
        self.k_norm = nnx.Param(jnp.ones(config.head_dim, param_dtype))

    def __call__(self, x: Float[Array, "B T D"], rope: RopeAngles, layer_idx: int, attend: Attend) -> Float[Array, "B T D"]:
        """Project, normalise and turn q and k, attend, project back."""
        batch, length, _ = x.shape
        head_dim, eps = self.config.head_dim, self.config.rms_norm_eps

        def heads(weight: Array) -> Array:
            return constrain(_linear(x, weight).reshape(batch, length, -1, head_dim), FSDP_AXIS, None, TENSOR_AXIS, None)

        q = apply_rope(rms_norm(heads(self.q_proj[...]), self.q_norm[...], eps), rope)
        k = apply_rope(rms_norm(heads(self.k_proj[...]), self.k_norm[...], eps), rope)
        out = attend(layer_idx, q, k, heads(self.v_proj[...]))
        return _linear(out.reshape(batch, length, -1), self.o_proj[...])


class FeedForward(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = _normal(rngs, (inner, hidden), hidden**-0.5, param_dtype)
        self.up_proj = _normal(rngs, (inner, hidden), hidden**-0.5, param_dtype)
        self.down_proj = _normal(rngs, (hidden, inner), (2 * config.num_layers * inner) ** -0.5, param_dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Position-wise; no state."""
        inner = jax.nn.silu(_linear(x, self.gate_proj[...])) * _linear(x, self.up_proj[...])
        return _linear(constrain(inner, FSDP_AXIS, None, TENSOR_AXIS), self.down_proj[...])


class Layer(nnx.Module):
    """One pre-norm block: attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: Qwen3Config, *, rngs: nnx.Rngs, param_dtype: jnp.dtype) -> None:
        self.eps = config.rms_norm_eps
        self.input_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.attention = Attention(config, rngs=rngs, param_dtype=param_dtype)
        self.mlp_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.mlp = FeedForward(config, rngs=rngs, param_dtype=param_dtype)

    def __call__(self, x: Float[Array, "B T D"], rope: RopeAngles, layer_idx: int, attend: Attend) -> Float[Array, "B T D"]:
        """The residual stream after this layer."""
        x = x + self.attention(rms_norm(x, self.input_norm[...], self.eps), rope, layer_idx, attend)
        x = x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))
        return shard_residual(x)


class Qwen3(nnx.Module):
    """The whole model. New weights are normal: std 1/sqrt(fan in), outputs to the residual stream smaller by sqrt(2 layers)."""

    def __init__(
        self, config: Qwen3Config, *, rngs: nnx.Rngs, embedding_init_std: float = 0.02, param_dtype: jnp.dtype = jnp.float32
    ) -> None:
        self.config = config
        table_shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = _normal(rngs, table_shape, embedding_init_std, param_dtype)
        self.layers = nnx.List([Layer(config, rngs=rngs, param_dtype=param_dtype) for _ in range(config.num_layers)])
        self.final_norm = nnx.Param(jnp.ones(config.hidden_size, param_dtype))
        self.lm_head = None if config.tie_word_embeddings else _normal(rngs, table_shape, embedding_init_std, param_dtype)

    def __call__(
        self, token_ids: Int[Array, "B T"], positions: Int[Array, "B T"], attend: Attend, *, remat: bool = False
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm, ready for `logits`.

        Args:
            attend: called once per layer while tracing, in the order of the layers.
            remat: recompute each layer in the backward pass; `attend` must then be free of side effects.
        """
        rope = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        x = shard_residual(self.embed_tokens[...][token_ids])
        for layer_idx, layer in enumerate(self.layers):

            def run(x: Array, layer: Layer = layer, layer_idx: int = layer_idx) -> Array:
                return layer(x, rope, layer_idx, attend)

            x = jax.checkpoint(run)(x) if remat else run(x)
        return rms_norm(x, self.final_norm[...], self.config.rms_norm_eps)

    @property
    def head(self) -> Float[Array, "V D"]:
        """The output matrix: lm_head, or the embedding where they are tied."""
        return self.embed_tokens[...] if self.lm_head is None else self.lm_head[...]

    def logits(self, hidden: Float[Array, "... D"]) -> Float32[Array, "... V"]:
        """Scores of the next token."""
        return head_logits(hidden, self.head)


def head_logits(hidden: Float[Array, "... D"], head: Float[Array, "V D"]) -> Float32[Array, "... V"]:
    """Products in the dtype of `hidden`, sums in float32."""
    return jnp.einsum("...d,vd->...v", hidden, head.astype(hidden.dtype), preferred_element_type=jnp.float32)


def sequence_logprobs(
    model: Qwen3, token_ids: Int[Array, "B T"], *, temperature: float = 1.0, chunk_tokens: int, remat: bool
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
    """log p(token t | tokens before t) at index t, and the entropy of that distribution; index 0 is 0 in both.

    Logits over the vocabulary exist for at most max(chunk_tokens, B) positions at a time, in the backward pass too: time is cut
    into chunks, each recomputed when its gradient is needed. Sequences are padded on the right; the caller masks what stands there.
    """
    batch, length = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    hidden = model(token_ids, positions, causal_attention, remat=remat)[:, :-1]
    # float32 here so that the chunks' gradients of the head are summed in float32; the forward pass sees no difference.
    head = model.head.astype(jnp.float32)

    @jax.checkpoint
    def score(hidden: Float[Array, "B C D"], targets: Int[Array, "B C"]) -> tuple[Float32[Array, "B C"], Float32[Array, "B C"]]:
        logits = constrain(head_logits(hidden, head) / temperature, FSDP_AXIS, None, TENSOR_AXIS)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum and not a gather: it stays local where the vocabulary is cut over devices, and has no scatter as gradient.
        is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
        logprobs = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1) - normalizer
        entropies = normalizer - jnp.sum(jnp.exp(logits - normalizer[..., None]) * logits, axis=-1)
        return logprobs, entropies

    chunk_length = min(max(chunk_tokens // batch, 1), max(length - 1, 1))
    num_chunks = -(-(length - 1) // chunk_length)

    def cut(x: Array) -> Array:
        padding = [(0, 0), (0, num_chunks * chunk_length - (length - 1))] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, padding).reshape(batch, num_chunks, chunk_length, *x.shape[2:]), 1, 0)

    def join(x: Float32[Array, "N B C"]) -> Float32[Array, "B T"]:
        return jnp.pad(jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, : length - 1], ((0, 0), (1, 0)))

    chunks = (cut(hidden), cut(token_ids[:, 1:]))
    _, (logprobs, entropies) = jax.lax.scan(lambda carry, chunk: (carry, score(*chunk)), None, chunks)
    return join(logprobs), join(entropies)


@jax.custom_vjp
def round_to_bfloat16(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    # Not a pair of casts: XLA may drop those as excess precision, and training would see weights that were never published.
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


round_to_bfloat16.defvjp(lambda x: (round_to_bfloat16(x), None), lambda _, gradient: (gradient,))


def cast_weights(params: nnx.State, *, weights_dtype: str | jnp.dtype, compute_dtype: str | jnp.dtype) -> nnx.State:
    """Master weights -> the values that are published (rounded to weights_dtype) -> the dtype of computation.

    Gradients pass straight through the rounding and arrive in the dtype of the master weights.
    """
    rounds = np.dtype(weights_dtype) == jnp.bfloat16

    def cast(value: Array) -> Array:
        return (round_to_bfloat16(value) if rounds else value).astype(compute_dtype)

    return jax.tree.map(cast, params)


def abstract_model(config: Qwen3Config, param_dtype: jnp.dtype = jnp.float32) -> Qwen3:
    """The model with shapes in place of arrays: nothing is allocated. nnx.split gives its graph and the tree of shapes."""
    return nnx.eval_shape(lambda: Qwen3(config, rngs=nnx.Rngs(0), param_dtype=param_dtype))


def create_model(
    config: Qwen3Config,
    *,
    seed: int,
    mesh: Mesh | None = None,
    embedding_init_std: float = 0.02,
    param_dtype: jnp.dtype = jnp.float32,
) -> Qwen3:
    """A new model, drawn from `seed` alone and made in its shards: no device ever holds a whole large model."""
    graph, shapes = nnx.split(abstract_model(config, param_dtype))

    def initial_params(key: Array) -> nnx.State:
        model = Qwen3(config, rngs=nnx.Rngs(params=key), embedding_init_std=embedding_init_std, param_dtype=param_dtype)
        return nnx.state(model)

    shardings = None if mesh is None else param_shardings(config, shapes, mesh)
    return nnx.merge(graph, jax.jit(initial_params, out_shardings=shardings)(jax.random.key(seed)))
