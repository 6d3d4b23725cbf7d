"""Reading and writing some elements of a weight on its device, addressed by flat position.

Positions are split into (row, column) on the host, so that 32-bit indices reach tensors of any size, and lists are padded to a few
lengths, so that one update after another runs the same programs. Each function stands beside a numpy reference of its signature.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, Shaped, UInt64

MIN_PADDED = 1024
"""Lists are padded to this length times a power of four: a program for each, seven of them up to four million elements."""


def padded_length(num_elements: int) -> int:
    """The length a list of `num_elements` is padded to."""
    length = MIN_PADDED
    while length < num_elements:
        length *= 4
    return length


def _rows_and_columns(shape: tuple[int, ...], positions: UInt64[np.ndarray, "n"]) -> tuple[np.ndarray, np.ndarray]:
    """Padded int32 indices; a padding row lies outside the tensor, where writes are dropped and reads give 0."""
    num_rows = shape[0] if len(shape) > 1 else 1
    num_columns = max(int(np.prod(shape)) // max(num_rows, 1), 1)
    rows = np.full(padded_length(len(positions)), num_rows, np.int32)
    columns = np.zeros(len(rows), np.int32)
    rows[: len(positions)], columns[: len(positions)] = np.divmod(positions.view(np.int64), num_columns)
    return rows, columns


def _as_matrix(tensor: Array) -> Array:
    return tensor.reshape(tensor.shape[0] if tensor.ndim > 1 else 1, -1)


@jax.jit
def _write(tensor: Array, rows: Int32[Array, "n"], columns: Int32[Array, "n"], values: Shaped[Array, "n"]) -> Array:
    matrix = _as_matrix(tensor)
    return matrix.at[rows, columns].set(values.astype(tensor.dtype), mode="drop").reshape(tensor.shape)


@functools.partial(jax.jit, static_argnames="dtype")
def _read(tensor: Array, rows: Int32[Array, "n"], columns: Int32[Array, "n"], dtype: str) -> Array:
    return _as_matrix(tensor).at[rows, columns].get(mode="fill", fill_value=0).astype(dtype)


def write_elements(tensor: Array, positions: UInt64[np.ndarray, "n"], values: Shaped[np.ndarray, "n"]) -> Array:
    """A new tensor with `values` at flat `positions`, which are distinct; the old one stays valid."""
    rows, columns = _rows_and_columns(tensor.shape, positions)
    padded = np.zeros(len(rows), values.dtype)
    padded[: len(values)] = values
    return _write(tensor, rows, columns, padded)


def write_elements_reference(tensor: Array, positions: UInt64[np.ndarray, "n"], values: Shaped[np.ndarray, "n"]) -> Array:
    """`write_elements` in numpy."""
    host = np.array(tensor)
    host.reshape(-1)[positions.view(np.int64)] = values.astype(host.dtype)
    return jnp.asarray(host)


def read_elements(tensor: Array, positions: UInt64[np.ndarray, "n"], dtype: str) -> Shaped[np.ndarray, "n"]:
    """Values at flat positions, in `dtype`, on the host."""
    rows, columns = _rows_and_columns(tensor.shape, positions)
    return np.asarray(_read(tensor, rows, columns, dtype))[: len(positions)]


def read_elements_reference(tensor: Array, positions: UInt64[np.ndarray, "n"], dtype: str) -> Shaped[np.ndarray, "n"]:
    """`read_elements` in numpy."""
    return np.asarray(tensor).reshape(-1)[positions.view(np.int64)].astype(jnp.dtype(dtype))
