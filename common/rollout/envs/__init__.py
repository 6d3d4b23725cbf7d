"""Environments that ship with ROSE; a user's own plug in as `module:Class`."""
