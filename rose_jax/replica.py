"""A replica in the learner's own process: JAX engine, the target its weights arrive at, and the subscriber that brings them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from common.config import Config
from common.serving.engine import StaleCache
from common.serving.loop import EngineLoop
from common.serving.replica import LocalReplica
from common.transfer.publisher import Publisher
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store
from common.transfer.subscriber import Subscriber
from rose_jax.export import named_tensors
from rose_jax.jetstream.config import JetStreamConfig
from rose_jax.jetstream.engine import JetStreamEngine
from rose_jax.mesh import param_shardings
from rose_jax.models.qwen3 import abstract_model, cast_weights
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.policy import Policy
from rose_jax.weight_target import JaxWeightTarget

MAX_TOP_LOGPROBS = 20
"""The most that clients of OpenAI's API may ask for."""


class JaxReplica(LocalReplica[nnx.State]):
    """A LocalReplica that starts without weights: its first version comes through the store like every other.

    Args:
        mesh: with an axis "tensor", over which the engine is cut; None: one device.
        drive: see LocalReplica.
    """

    def __init__(
        self,
        replica_id: str,
        config: Config,
        model_config: Qwen3Config,
        store: Store,
        *,
        mesh: Mesh | None = None,
        drive: Callable[..., EngineLoop[nnx.State]] = EngineLoop,
    ) -> None:
        dtype = jnp.dtype(config.model.compute_dtype)
        _, shapes = nnx.split(abstract_model(model_config, dtype))
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        if mesh is not None:
            empty = jax.device_put(empty, param_shardings(model_config, empty, mesh))
        sampler = config.sampler
        engine_config = JetStreamConfig(
            max_slots=sampler.max_slots,
            max_context_tokens=sampler.max_context_tokens,
            page_tokens=sampler.page_tokens,
            tile_tokens=sampler.page_tokens,
            max_prefill_tiles=sampler.max_prefill_tiles,
            max_step_draws=sampler.tokens_per_sequence,
            max_top_logprobs=MAX_TOP_LOGPROBS,
            stale_cache=StaleCache(sampler.stale_cache),
            invariant=sampler.invariant,
        )
        engine = JetStreamEngine(engine_config, model_config, empty, version=0, mesh=mesh)
        self.target = JaxWeightTarget(engine, model_config, empty, weights_dtype=config.model.weights_dtype)
        subscriber = Subscriber(store, self.target, receiver_id=replica_id, timeout_s=config.transfer.timeout_s)
        super().__init__(
            replica_id,
            engine,
            subscriber,
            max_step_tokens=sampler.max_step_tokens,
            tokens_per_sequence=sampler.tokens_per_sequence,
            drive=drive,
        )

    def differing_tensors(self, published: Mapping[str, np.ndarray]) -> list[str]:
        """Names of live tensors whose bits are not those of the published ones."""
        return [name for name, tensor in published.items() if tensor.tobytes() != self.target.published(name).tobytes()]


def replica_of_policy(config: Config, policy: Policy, *, version: int) -> JaxReplica:
    """A replica whose store holds one policy as `version`, ready to be staged: for evaluations without a learner."""
    store = MemoryStore()
    publisher = Publisher(store)
    weights = cast_weights(policy.params, weights_dtype=config.model.weights_dtype, compute_dtype=config.model.weights_dtype)
    publisher.publish(version, {name: np.asarray(tensor) for name, tensor in named_tensors(weights)}).result()
    publisher.close()
    return JaxReplica("local", config, policy.model_config, store)
