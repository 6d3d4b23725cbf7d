"""common/ and configs/ work where no accelerator library is installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

JAX_SIDE = ("jax", "jaxlib", "flax", "optax", "orbax", "jetstream", "tensorflow", "rose_jax")
BLOCKED = (*JAX_SIDE, "torch", "vllm", "transformers", "rose_gpu")

PROGRAM = f"""
import importlib, pkgutil, sys
BLOCKED = {BLOCKED!r}
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Blocker())
import common, configs
names = [m.name for package in (common, configs) for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_common_imports_with_every_accelerator_library_blocked() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_a_foreign_common_is_named_with_both_paths(tmp_path: Path) -> None:
    foreign = tmp_path / "common"
    foreign.mkdir()
    (foreign / "__init__.py").write_text((ROOT / "common" / "__init__.py").read_text())
    entry = ROOT / "scripts" / "train.py"
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import common; common.check_installation({str(entry)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert str(foreign) in done.stderr
    assert str(ROOT / "common") in done.stderr
    assert "python -m scripts" in done.stderr
