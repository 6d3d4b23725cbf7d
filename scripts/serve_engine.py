"""The engine process of scripts.serve: one replica, its event loop, and the channel to the front. It knows token ids only.

It loads the model (or starts empty, with a store to take weights from), compiles what steps need, says hello and serves until the
front is gone. SIGINT is the front's to handle: from a terminal both get it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from common.config import Config, MeshConfig
from common.rollout.environment import load_task_suite
from common.serving.front.channel import Channel
from common.serving.front.engine_server import EngineServer
from common.serving.front.remote_errors import to_wire
from common.serving.loop import EngineLoop
from common.transfer.publisher import Publisher
from common.transfer.secrets import client_tls, read_secret
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.memory import MemoryStore
from common.transfer.store.protocol import Store
from common.transfer.subscriber import Subscriber
from rose_jax.export import load_config, named_tensors
from rose_jax.mesh import make_mesh
from rose_jax.models.qwen3 import cast_weights
from rose_jax.policy import build_policy
from scripts.entry import is_users, one_line
from scripts.replicas import make_replica

FIRST_VERSION = 0
"""Of weights that come from a folder or are random, until a learner's are staged."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """Where weights come from (None: from the model that is served) and what HTTP stores ask for."""

    address: str | None
    token: str | None
    ca: str | None

    def open(self, address: str, timeout_s: float) -> Store:
        """Raises ValueError if the address has no form that a store has."""
        if address.startswith(("http://", "https://")):
            token = read_secret(self.token) if self.token else None
            tls = client_tls(Path(self.ca)) if self.ca and address.startswith("https://") else None
            return HttpStore(address, token=token, tls=tls, timeout_s=timeout_s)
        return DirectoryStore(address)


def run_engine(config: Config, *, replica_id: str, channel_fd: int, store: StoreOptions, warm_up: bool) -> None:
    """Serve until the front is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.sampler.backend == "vllm":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX only reads the checkpoint; the device is vLLM's
    asyncio.run(_serve(config, replica_id, socket.socket(fileno=channel_fd), store, warm_up))


async def _serve(config: Config, replica_id: str, end: socket.socket, options: StoreOptions, warm_up: bool) -> None:
    channel = await Channel.over(end)
    try:
        replica = make_served_replica(config, replica_id, options)
        async with replica:
            if options.address is None:
                await replica.stage()
                await replica.commit()
            if warm_up and config.sampler.backend == "jetstream":
                replica.engine.warm_up()  # vLLM on CPU compiles nothing
            timeout_s = config.transfer.timeout_s

            def subscribe(address: str) -> Subscriber:
                return Subscriber(options.open(address, timeout_s), replica.target, receiver_id=replica_id, timeout_s=timeout_s)

            info = replica.engine.info
            server = EngineServer(channel, replica, replica.target, info=info, subscribe=subscribe, store=options.address)
            await server.serve()
    except Exception as error:
        channel.send({"kind": "failed", "text": one_line(error) if is_users(error) else to_wire(error)[1]})
        await channel.close()
        if not is_users(error):
            raise
        raise SystemExit(1) from error


def make_served_replica(
    config: Config, replica_id: str, options: StoreOptions, *, drive: Callable[..., EngineLoop[Any]] = EngineLoop
) -> Any:
    """A replica without weights, and in its store what it is to serve, unless that is still to come.

    Args:
        drive: see LocalReplica.

    Raises:
        CheckpointError: the model's folder cannot be used.
        ValueError: the backend cannot run this model.
    """
    if options.address is not None and config.model.checkpoint is not None:
        model_config = load_config(Path(config.model.checkpoint))
        store = options.open(options.address, config.transfer.timeout_s)
        return make_replica(replica_id, config, model_config, store, drive=drive)
    policy = build_policy(config, load_task_suite(config.env.factory, config.env.options), make_mesh(MeshConfig()))
    if options.address is not None:
        store = options.open(options.address, config.transfer.timeout_s)
        return make_replica(replica_id, config, policy.model_config, store, drive=drive)
    own_store, dtype = MemoryStore(), config.model.weights_dtype
    weights = cast_weights(policy.params, weights_dtype=dtype, compute_dtype=dtype)
    with contextlib.closing(Publisher(own_store)) as publisher:
        publisher.publish(FIRST_VERSION, {name: np.asarray(tensor) for name, tensor in named_tensors(weights)}).result()
    return make_replica(replica_id, config, policy.model_config, own_store, drive=drive)
