"""Weights as bit patterns: every dtype that travels, seen as unsigned integers of its width.

All of transfer works on patterns, so that NaN payloads, -0 and infinities are values like any other and equality means equality of
bits. Views only: nothing here copies.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
}
ITEM_BYTES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}
BITS_DTYPES: dict[str, np.dtype] = {name: np.dtype(f"u{size}") for name, size in ITEM_BYTES.items()}


def flat_bits(array: np.ndarray) -> np.ndarray:
    """The bit patterns of a C-contiguous array, flat, sharing its memory.

    Raises:
        ValueError: the dtype cannot travel, or a view is impossible because the array is not C-contiguous.
    """
    if array.dtype.name not in DTYPES:
        raise ValueError(f"dtype {array.dtype} cannot travel; use one of {', '.join(DTYPES)}")
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} and strides {array.strides} is not C-contiguous; copy it first")
    return array.reshape(-1).view(BITS_DTYPES[array.dtype.name])


def from_bits(bits: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of flat_bits, sharing memory."""
    return bits.view(DTYPES[dtype]).reshape(shape)
