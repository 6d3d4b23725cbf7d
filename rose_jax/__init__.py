"""The JAX side: learner, models, JetStream engine."""
