"""Byte streams inside an encoded run: each is stored raw, or by zstd where that is smaller, after its length.

The reader trusts no length: it is told how many bytes a stream may have at most and compares before anything is inflated, so that
a small object cannot claim much memory. zstd level 1 codes the literals of these streams by Huffman; higher levels gained nothing.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from jaxtyping import UInt8

from common.transfer.errors import MalformedUpdateError, TruncatedError

ZSTD_LEVEL = 1
MIN_ZSTD_BYTES = 24
"""A zstd frame's own header and table take about this much."""
_MAX_WINDOW_BYTES = 1 << 27

_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    """One per thread: the library's contexts must not be used by two at once."""
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True, write_checksum=False)
    return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
    return _local.decompressor


def deflate(payload: bytes | memoryview) -> bytes:
    return _compressor().compress(payload)


def inflate(frame: bytes | memoryview, *, max_bytes: int) -> bytes:
    """The content of one zstd frame, refused before inflating if it announces more than `max_bytes`."""
    try:
        announced = zstandard.get_frame_parameters(frame).content_size
        if announced > max_bytes:  # an unknown size reads as 2^64 - 1
            raise MalformedUpdateError(f"a compressed stream announces {announced} bytes where at most {max_bytes} are possible")
        content = _decompressor().decompress(frame, max_output_size=max_bytes)
    except zstandard.ZstdError as e:
        raise MalformedUpdateError(f"a compressed stream of {len(frame)} bytes cannot be read: {e}") from None
    if len(content) != announced:
        raise TruncatedError(f"a compressed stream announces {announced} bytes and holds {len(content)}")
    return content


class StreamWriter:
    """Collects a run's header numbers and streams; `parts` are the pieces of its payload in order."""

    def __init__(self) -> None:
        self.header = bytearray()
        self.bodies: list[bytes | memoryview] = []

    def number(self, value: int) -> None:
        """Append an unsigned number to the header, seven bits a byte, low first."""
        while value >= 0x80:
            self.header.append(value & 0x7F | 0x80)
            value >>= 7
        self.header.append(value)

    def stream(self, values: UInt8[np.ndarray, "n"], *, compress: bool = True) -> None:
        raw = values.data if values.flags.c_contiguous else np.ascontiguousarray(values).data
        if compress and len(raw) >= MIN_ZSTD_BYTES:
            coded = deflate(raw)
            if len(coded) < len(raw):
                self.number(len(raw) << 1 | 1)
                self.number(len(coded))
                self.bodies.append(coded)
                return
        self.number(len(raw) << 1)
        self.bodies.append(raw.cast("B"))

    def parts(self) -> list[bytes | memoryview]:
        return [bytes([len(self.header)]), bytes(self.header), *self.bodies]


class StreamReader:
    """Reads what StreamWriter wrote, in the same order."""

    def __init__(self, payload: memoryview) -> None:
        if not payload or len(payload) <= payload[0]:
            raise TruncatedError(f"a run of {len(payload)} bytes ends within its header")
        self._header = payload[1 : 1 + payload[0]]
        self._bodies = payload[1 + payload[0] :]

    def number(self, *, at_most: int) -> int:
        value, shift = 0, 0
        for i, byte in enumerate(self._header):
            value |= (byte & 0x7F) << shift
            if value > at_most:
                break
            if byte < 0x80:
                self._header = self._header[i + 1 :]
                return value
            shift += 7
        raise MalformedUpdateError(f"a number in a run's header is cut short or above {at_most}")

    def stream(self, *, max_bytes: int, num_bytes: int | None = None) -> UInt8[np.ndarray, "n"]:
        """The next stream: of exactly `num_bytes` if given, else of at most `max_bytes`. Raw streams are views of the payload."""
        length = self.number(at_most=max_bytes << 1 | 1)
        raw_bytes, compressed = length >> 1, length & 1
        if num_bytes is not None and raw_bytes != num_bytes:
            raise MalformedUpdateError(f"a stream has {raw_bytes} bytes, not {num_bytes}")
        coded_bytes = self.number(at_most=raw_bytes) if compressed else raw_bytes
        if coded_bytes > len(self._bodies):
            raise TruncatedError(f"a stream of {coded_bytes} bytes where {len(self._bodies)} are left")
        body, self._bodies = self._bodies[:coded_bytes], self._bodies[coded_bytes:]
        if not compressed:
            return np.frombuffer(body, np.uint8)
        content = inflate(body, max_bytes=raw_bytes)
        if len(content) != raw_bytes:
            raise MalformedUpdateError(f"a stream announces {raw_bytes} bytes and holds {len(content)}")
        return np.frombuffer(content, np.uint8)

    def end(self) -> None:
        """Everything must have been read."""
        if self._header or self._bodies:
            raise MalformedUpdateError(f"a run has {len(self._header)} + {len(self._bodies)} bytes beyond its end")
