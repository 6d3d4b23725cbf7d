"""What `bench_transfer` compares with: three plain encodings of a new version, each exact, each as fast as numpy makes it.

  full         all values as they are
  index_value  32-bit position and new value of each changed element (TRL and others)
  xor_zstd     byte planes of new XOR old, by zstd level 1

They encode one flat array of bit patterns at a time, in pieces that fit a core's cache, and decode to absolute values. A length
before each piece is all the framing there is: no manifest, no fingerprints.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import zstandard
from jaxtyping import Shaped

PIECE_ELEMENTS = 1 << 21
METHODS = ("index_value", "xor_zstd", "full")

Bits = Shaped[np.ndarray, "N"]
Decoded = tuple[int, np.ndarray | None, np.ndarray]
"""First element of the piece, changed positions within it (None: all), new bits."""


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, PIECE_ELEMENTS):
        yield start, min(start + PIECE_ELEMENTS, size)


def encode(method: str, old: Bits, new: Bits) -> list[bytes | memoryview]:
    """The parts of what goes on the wire for one array."""
    parts: list[bytes | memoryview] = []
    for start, end in _pieces(len(new)):
        parts.extend(_ENCODERS[method](old[start:end], new[start:end]))
    return parts


def decode(method: str, wire: memoryview, old: Bits) -> Iterator[Decoded]:
    """New bits, piece by piece, of an array that is `old` here."""
    for start, end in _pieces(len(old)):
        positions, bits, used = _DECODERS[method](wire, old[start:end])
        wire = wire[used:]
        yield start, positions, bits


def write(decoded: Decoded, bits: Bits) -> None:
    """Put a decoded piece into the live array."""
    start, positions, new = decoded
    if positions is None:
        bits[start : start + len(new)] = new
    else:
        bits[start:][positions] = new


def _encode_full(old: Bits, new: Bits) -> list[bytes | memoryview]:
    return [new.view(np.uint8).data]


def _decode_full(wire: memoryview, old: Bits) -> tuple[None, Bits, int]:
    return None, np.frombuffer(wire[: old.nbytes], old.dtype), old.nbytes


def _encode_index_value(old: Bits, new: Bits) -> list[bytes | memoryview]:
    positions = np.flatnonzero(old != new)
    values = new[positions]
    return [struct.pack("<I", len(positions)), positions.astype(np.uint32).view(np.uint8).data, values.view(np.uint8).data]


def _decode_index_value(wire: memoryview, old: Bits) -> tuple[np.ndarray, Bits, int]:
    (count,) = struct.unpack_from("<I", wire)
    values_start = 4 + 4 * count
    end = values_start + count * old.itemsize
    return np.frombuffer(wire[4:values_start], np.uint32), np.frombuffer(wire[values_start:end], old.dtype), end


def _encode_xor_zstd(old: Bits, new: Bits) -> list[bytes | memoryview]:
    planes = (old ^ new).view(np.uint8).reshape(-1, old.itemsize)
    compressor = zstandard.ZstdCompressor(level=1)
    parts: list[bytes | memoryview] = []
    for i in range(old.itemsize):
        coded = compressor.compress(np.ascontiguousarray(planes[:, i]).data)
        parts += [struct.pack("<I", len(coded)), coded]
    return parts


def _decode_xor_zstd(wire: memoryview, old: Bits) -> tuple[None, Bits, int]:
    planes = np.empty((len(old), old.itemsize), np.uint8)
    decompressor = zstandard.ZstdDecompressor()
    used = 0
    for i in range(old.itemsize):
        (length,) = struct.unpack_from("<I", wire, used)
        plane = decompressor.decompress(wire[used + 4 : used + 4 + length], max_output_size=len(old))
        planes[:, i] = np.frombuffer(plane, np.uint8)
        used += 4 + length
    bits = planes.reshape(-1).view(old.dtype)
    bits ^= old
    return None, bits, used


_ENCODERS: dict[str, Callable[[Bits, Bits], list[bytes | memoryview]]] = {
    "full": _encode_full,
    "index_value": _encode_index_value,
    "xor_zstd": _encode_xor_zstd,
}
_DECODERS: dict[str, Callable[[memoryview, Bits], tuple[np.ndarray | None, Bits, int]]] = {
    "full": _decode_full,
    "index_value": _decode_index_value,
    "xor_zstd": _decode_xor_zstd,
}
