"""Serving: the engine contract, what drives an engine, and the policies that decide."""
