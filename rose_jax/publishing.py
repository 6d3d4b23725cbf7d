"""The learner's end of weight transfer: names its published weights as a checkpoint does and hands them to a Publisher.

A learner of several processes has one in each, and each publishes what its own devices hold. Nothing is gathered.
"""

from __future__ import annotations

import uuid

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from common.config import Config
from common.transfer.publisher import Publisher
from common.transfer.store.protocol import Store
from common.transfer.writers import Writers
from rose_jax.density import unchanged_share
from rose_jax.export import named_tensors
from rose_jax.learner import Learner
from rose_jax.shards import source_of


def writers_of_processes() -> Writers:
    """This process among those of the learner. All of them must call it at the same time: they agree on a new lineage."""
    mine = np.frombuffer(uuid.uuid4().bytes[:8], np.int32)
    agreed = mine if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(mine))
    return Writers(writer=jax.process_index(), num_writers=jax.process_count(), lineage=agreed.tobytes().hex())


class LearnerPublisher:
    """Publishes one version after the other from a learner. The first of a process is whole; later ones carry what changed."""

    def __init__(self, config: Config, store: Store) -> None:
        self._publisher = Publisher(store, anchor_interval=config.transfer.anchor_interval, writers=writers_of_processes())
        self._previous: nnx.State | None = None

    def publish(self, learner: Learner) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Publish the learner's version and wait until replicas can have all of it.

        Returns:
            The weights as published, by checkpoint name, where this process holds all of them, else nothing; and metrics: bytes on
            the wire, their share of the dense size, changes.
        """
        published = learner.published_params()
        sources = {name: source_of(tensor, name) for name, tensor in named_tensors(published)}
        report = self._publisher.publish(learner.version, sources).result()
        metrics = {
            "wire_bytes": float(report.wire_bytes),
            "wire_share_of_dense": report.wire_bytes / report.dense_bytes,
        }
        if self._previous is not None:
            metrics |= unchanged_share(self._previous, published)
        self._previous = published
        return {name: source for name, source in sources.items() if isinstance(source, np.ndarray)}, metrics

    def close(self) -> None:
        self._publisher.close()
