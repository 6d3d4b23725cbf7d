"""Rollouts: environments, episodes, groups."""
