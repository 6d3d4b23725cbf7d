"""Environment of all tests: JAX sees eight fake CPU devices, whatever the machine has.

It must be set before the first import of jax, which is why it stands here and not in a fixture. An accelerator is used only where
JAX_PLATFORMS says so from outside. Generated examples have no deadline: how fast a busy machine is, is no law of ours.
"""

import os

from hypothesis import settings

settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

NUM_FAKE_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
XLA_FLAGS = {
    "xla_force_host_platform_device_count": NUM_FAKE_DEVICES,
    # Nearly all the time of these tests is compilation, of programs that run for milliseconds: this halves it.
    "xla_backend_optimization_level": 0,
}
for flag, value in XLA_FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}".strip()
