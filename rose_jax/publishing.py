"""The learner's end of weight transfer: names its published weights as a checkpoint does and hands them to a Publisher."""

from __future__ import annotations

import numpy as np
from flax import nnx

from common.config import Config
from common.transfer.publisher import Publisher
from common.transfer.store.protocol import Store
from rose_jax.density import unchanged_share
from rose_jax.export import named_tensors
from rose_jax.learner import Learner


class LearnerPublisher:
    """Publishes one version after the other from a learner. The first of a process is whole; later ones carry what changed."""

    def __init__(self, config: Config, store: Store) -> None:
        self._publisher = Publisher(store, anchor_interval=config.transfer.anchor_interval)
        self._previous: nnx.State | None = None

    def publish(self, learner: Learner) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Publish the learner's version and wait until replicas can have all of it.

        Returns:
            The weights as published, by checkpoint name; and metrics: bytes on the wire, their share of the dense size, changes.
        """
        published = learner.published_params()
        named = {name: np.asarray(tensor) for name, tensor in named_tensors(published)}
        report = self._publisher.publish(learner.version, named).result()
        metrics = {
            "wire_bytes": float(report.wire_bytes),
            "wire_share_of_dense": report.wire_bytes / report.dense_bytes,
        }
        if self._previous is not None:
            metrics |= unchanged_share(self._previous, published)
        self._previous = published
        return named, metrics

    def close(self) -> None:
        self._publisher.close()
