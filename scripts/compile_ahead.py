"""Compile one update of a large model from shapes alone and print the memory that each device needs. No weight is ever made.

    python -m scripts.compile_ahead --model=qwen3_8b --fsdp=8 --tensor=1 --batch=8 --seq=4096

The update is the learner's own: forward and backward pass over bfloat16 weights with every layer rematerialised, gradients and
AdamW in float32. Devices are CPU devices that do not exist, so a missing machine is no obstacle. Their compiler has no bfloat16
arithmetic and keeps activations and gathered weights in float32: take temporaries as an upper bound, arguments as exact.
--config takes optimizer, loss and chunk sizes from a configuration; shape and mesh are those of the flags.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax
from absl import flags

from common.config import Config, MeshConfig
from rose_jax.export import load_config
from rose_jax.mesh import make_mesh
from rose_jax.models.qwen3_config import Qwen3Config
from rose_jax.update import lower_update
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS)
_MODEL = flags.DEFINE_string(
    "model", "qwen3_8b", "qwen3_8b, qwen3_32b, or a Hugging Face folder (only its config.json is read).", flag_values=_FLAGS
)
_FSDP = flags.DEFINE_integer("fsdp", 8, "Devices over which batches and all weights are cut.", lower_bound=1, flag_values=_FLAGS)
_TENSOR = flags.DEFINE_integer("tensor", 1, "Devices over which heads and inner sizes are cut.", lower_bound=1, flag_values=_FLAGS)
_BATCH = flags.DEFINE_integer("batch", 8, "Rows of one update.", lower_bound=1, flag_values=_FLAGS)
_SEQ = flags.DEFINE_integer("seq", 4096, "Tokens of one row.", lower_bound=1, flag_values=_FLAGS)

# From the models' published config.json.
_QWEN3 = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=12_288,
    tie_word_embeddings=False,
    rope_theta=1_000_000.0,
    max_position_embeddings=40_960,
)
MODELS = {
    "qwen3_8b": _QWEN3,
    "qwen3_32b": dataclasses.replace(_QWEN3, hidden_size=5120, num_layers=64, num_heads=64, intermediate_size=25_600),
}

COMPILER_OPTIONS: dict[str, str | bool] = {
    # The default schedule runs what it can at once and holds every layer's whole gradient for it: 75 GiB where this one needs 30.
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    # The program is measured, not run: do not spend time on fast machine code.
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileReport:
    """Bytes are per device. Outputs take the place of donated arguments except for `fresh_output_bytes`."""

    argument_bytes: int
    fresh_output_bytes: int
    temporary_bytes: int
    lower_s: float
    compile_s: float

    @property
    def total_bytes(self) -> int:
        return self.argument_bytes + self.fresh_output_bytes + self.temporary_bytes


def compile_ahead(config: Config, model_config: Qwen3Config, *, num_rows: int, num_tokens: int) -> CompileReport:
    """Lower and compile one update on the mesh of `config`, whose devices must be there, real or fake."""
    mesh = make_mesh(config.mesh)
    started_s = time.monotonic()
    lowered = lower_update(config, model_config, mesh, num_rows=num_rows, num_tokens=num_tokens)
    lowered_s = time.monotonic()
    memory = lowered.compile(compiler_options=COMPILER_OPTIONS).memory_analysis()
    assert memory is not None, "the CPU compiler reports its memory"
    return CompileReport(
        argument_bytes=memory.argument_size_in_bytes,
        fresh_output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        lower_s=lowered_s - started_s,
        compile_s=time.monotonic() - lowered_s,
    )


def training_config(mesh: MeshConfig, base: Config | None) -> Config:
    """How a large model is trained: bfloat16 arithmetic, every layer rematerialised; the rest from `base` or the defaults."""
    config = Config() if base is None else base
    model = dataclasses.replace(config.model, weights_dtype="bfloat16", compute_dtype="bfloat16", remat=True)
    return dataclasses.replace(config, model=model, mesh=mesh)


def main() -> None:
    """Print the table."""
    mesh = MeshConfig(fsdp=_FSDP.value, tensor=_TENSOR.value)
    num_devices = mesh.fsdp * mesh.tensor
    config = training_config(mesh, _CONFIG.value)
    rows_multiple = mesh.fsdp * config.optim.accumulation_steps
    if _BATCH.value % rows_multiple:
        raise ValueError(
            f"--batch={_BATCH.value} is not divisible by {rows_multiple} (--fsdp={mesh.fsdp} x optim.accumulation_steps="
            f"{config.optim.accumulation_steps}); use {-(-_BATCH.value // rows_multiple) * rows_multiple}"
        )
    model_config = MODELS.get(_MODEL.value) or load_config(Path(_MODEL.value))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    report = compile_ahead(config, model_config, num_rows=_BATCH.value, num_tokens=_SEQ.value)
    print(
        f"{_MODEL.value} on {num_devices} devices (fsdp {mesh.fsdp} x tensor {mesh.tensor}), {_BATCH.value} x {_SEQ.value} tokens"
    )
    for name, size_bytes in (
        ("weights, optimizer, batch", report.argument_bytes),
        ("outputs not in their place", report.fresh_output_bytes),
        ("temporaries (upper bound)", report.temporary_bytes),
        ("together", report.total_bytes),
    ):
        print(f"  {name:<28}{size_bytes / GIB:8.2f} GiB per device")
    print(f"  lowered in {report.lower_s:.1f} s, compiled in {report.compile_s:.1f} s")


if __name__ == "__main__":
    entry.run(main)
