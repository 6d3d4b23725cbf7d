"""Device-side kernels, each beside a plain reference of the same signature."""
