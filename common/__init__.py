"""What both accelerators share: policies, protocols, environments, transfer.

Refuses to import jax, torch, vllm, rose_jax or rose_gpu (import-linter holds the contract; tests/common/test_imports.py runs it
with those packages blocked). `common` is a generic name, so entry points call `check_installation` to be sure that it is this one.
"""

from pathlib import Path

ROSE_MARKER = "rose"


def check_installation(entry_file: str) -> None:
    """Fail if the `common` that was imported is not the one that lies beside the entry point's own package.

    Args:
        entry_file: `__file__` of the script; its grandparent is the root of the checkout.
    Raises:
        RuntimeError: names both paths and the fix.
    """
    ours = Path(entry_file).resolve().parent.parent / "common" / "__init__.py"
    if Path(__file__).resolve() != ours:
        raise RuntimeError(
            f"imported common from {__file__}, expected {ours}: another package named `common` comes first on sys.path. "
            "Run scripts as `python -m scripts.NAME` from the root of the checkout."
        )
