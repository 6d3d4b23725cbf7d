"""Device code for torch, each beside a plain reference of the same signature."""
