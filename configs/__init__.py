"""Configurations: each file has a get_config() that returns common.config.Config."""
