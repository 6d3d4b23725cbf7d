"""Models in Flax NNX."""
