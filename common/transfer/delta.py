"""The encoding of one run: what changed since the base version, or the whole of it, exact for every bit pattern.

A changed element is its gap to the one before and the difference of its bit pattern to the old one, as integers modulo 2^width: a
step of a small learning rate moves a weight by one code up or down, and then sign and magnitude take exactly one bit, where an XOR
takes two (its carries make runs of ones). Three codings:

  GAPS   gaps as bytes (255 = "255 further"; below one change in 370 the low bytes go to a plane of their own), entropy-coded
  MASK   one bit per element; none at all where every element changed
  WHOLE  the new values, as they are or in byte planes by zstd

GAPS and MASK are followed by the differences: signs packed to bits, then magnitudes. A magnitude of one costs nothing; others are
marked in a mask of their own where they are few. Decoding gives absolute values, so that writing them twice equals writing once.
Refuses: any length, count or position out of bounds, before memory is taken for it.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from jaxtyping import Bool, Shaped, UInt8, UInt32

from common.transfer.errors import MalformedUpdateError
from common.transfer.streams import StreamReader, StreamWriter

ESCAPE = 255
SPLIT_GAP = 370
"""Mean gap from which on the low byte is close to uniform and half of the escapes would be further escapes."""
MASK_SHARE = 0.3
"""Share of changed elements above which a mask is not larger than gaps, and faster."""
RARE_SHARE = 0.25
"""Share of magnitudes above one up to which marking them costs less than writing every magnitude."""


class Coding(enum.IntEnum):
    GAPS = 1
    MASK = 2
    WHOLE = 3


Parts = list[bytes | memoryview]


def encode_changes(
    local: UInt32[np.ndarray, "n"], old: Shaped[np.ndarray, "n"], new: Shaped[np.ndarray, "n"], num_elements: int
) -> Parts:
    """Encode n > 0 changed elements of a run; positions are sorted. The parts share no memory with the arguments."""
    if len(local) > MASK_SHARE * num_elements:
        mask = np.zeros(num_elements, bool)
        mask[local] = True
        return _encode_masked(mask, new - old)
    writer = StreamWriter()
    writer.number(Coding.GAPS)
    writer.number(len(local))
    _write_gaps(writer, local, num_elements)
    _write_differences(writer, new - old)
    return writer.parts()


def encode_dense_changes(old: Shaped[np.ndarray, "n"], new: Shaped[np.ndarray, "n"]) -> tuple[Parts, int]:
    """Encode a run many of whose elements changed, given all of them, and count the changed ones (0: no parts). No positions are
    made: several times faster than by way of find_changes."""
    mask = old != new
    changed = mask.nonzero()[0]  # indexing by positions is four times as fast as by the mask itself
    return (_encode_masked(mask, (new - old).take(changed)), len(changed)) if len(changed) else ([], 0)


def _encode_masked(mask: Bool[np.ndarray, "n"], steps: Shaped[np.ndarray, "k"]) -> Parts:
    writer = StreamWriter()
    writer.number(Coding.MASK)
    writer.number(len(steps))
    if len(steps) < len(mask):
        writer.stream(np.packbits(mask), compress=not 0.35 < len(steps) / len(mask) < 0.65)
    _write_differences(writer, steps)
    return writer.parts()


def encode_whole(bits: Shaped[np.ndarray, "n"], *, compress: bool) -> Parts:
    """Encode all elements of a run. Without `compress` the parts share the memory of `bits`."""
    writer = StreamWriter()
    writer.number(Coding.WHOLE)
    if not compress:
        writer.number(0)
        writer.stream(bits.view(np.uint8), compress=False)
        return writer.parts()
    writer.number(1)
    for plane in _byte_planes(bits):
        writer.stream(plane)
    return writer.parts()


@dataclasses.dataclass(frozen=True)
class DecodedRun:
    """What a run's payload says: all `values`; or differences `steps` to the bits held now, at n sorted positions `local`, or one
    for each element where many changed."""

    values: Shaped[np.ndarray, "N"] | None = None
    local: UInt32[np.ndarray, "n"] | None = None
    steps: Shaped[np.ndarray, "n"] | None = None


def decode_run(payload: memoryview, num_elements: int, bits_dtype: np.dtype) -> DecodedRun:
    """Decode one run of `num_elements` elements. New bits are old bits + steps, modulo the width of `bits_dtype`.

    Raises:
        MalformedUpdateError: bytes that encode_changes and encode_whole do not write. Memory taken until then is bounded by
            a small multiple of the run's dense size.
    """
    reader = StreamReader(payload)
    coding = reader.number(at_most=Coding.WHOLE)
    if coding == Coding.WHOLE:
        values = _read_whole(reader, num_elements, bits_dtype)
        reader.end()
        return DecodedRun(values=values)
    if coding not in (Coding.GAPS, Coding.MASK):
        raise MalformedUpdateError(f"unknown coding {coding}")
    count = reader.number(at_most=num_elements)
    if count == 0:
        raise MalformedUpdateError("a run without changes has no payload at all")
    if coding == Coding.GAPS:
        local = _read_gaps(reader, count, num_elements)
        steps = _read_differences(reader, count, bits_dtype)
        reader.end()
        return DecodedRun(local=local, steps=steps)
    changed = None
    if count < num_elements:
        changed = np.unpackbits(_exactly(reader, -(-num_elements // 8)), count=num_elements).view(bool).nonzero()[0]
        if len(changed) != count:
            raise MalformedUpdateError(f"a mask marks {len(changed)} elements, {count} were announced")
    steps = _read_differences(reader, count, bits_dtype)
    reader.end()
    if changed is None:
        return DecodedRun(steps=steps)
    every_step = np.zeros(num_elements, bits_dtype)
    every_step[changed] = steps
    return DecodedRun(steps=every_step)


def _exactly(reader: StreamReader, num_bytes: int) -> UInt8[np.ndarray, "n"]:
    return reader.stream(max_bytes=num_bytes, num_bytes=num_bytes)


def _write_gaps(writer: StreamWriter, local: UInt32[np.ndarray, "n"], num_elements: int) -> None:
    gaps = np.empty_like(local)
    gaps[0] = local[0]
    np.subtract(local[1:], local[:-1], out=gaps[1:])
    gaps[1:] -= np.uint32(1)
    mean = num_elements // len(local)
    low_bytes = 0 if mean < SPLIT_GAP else 1 if mean < SPLIT_GAP << 8 else 2
    writer.number(low_bytes)
    for _ in range(low_bytes):
        writer.stream(gaps.astype(np.uint8))
        gaps >>= np.uint32(8)
    escapes = gaps // np.uint32(ESCAPE)
    ends = np.cumsum(escapes, dtype=np.int64)
    ends += np.arange(len(ends))
    escapes *= np.uint32(ESCAPE)
    gaps -= escapes
    coded = np.full(int(ends[-1]) + 1, ESCAPE, np.uint8)
    coded[ends] = gaps
    writer.stream(coded)


def _read_gaps(reader: StreamReader, count: int, num_elements: int) -> UInt32[np.ndarray, "n"]:
    low_bytes = reader.number(at_most=2)
    planes = [_exactly(reader, count) for _ in range(low_bytes)]
    coded = reader.stream(max_bytes=count + (num_elements >> 8 * low_bytes) // ESCAPE + 1)
    last = coded != ESCAPE
    ends = last.nonzero()[0]
    if len(ends) != count or ends[-1] != len(coded) - 1:
        raise MalformedUpdateError(f"{len(ends)} gaps where {count} were announced")
    if not low_bytes:
        # The sum is at most 256 for each coded byte, and there are at most num_elements / 255 escapes: 64 bits hold it.
        last_position = np.cumsum(coded + last.astype(np.uint16), dtype=np.uint64)
        local = last_position if len(coded) == count else last_position.take(ends)
    else:
        high = np.cumsum(coded, dtype=np.uint64).take(ends)
        high[1:] -= high[:-1].copy()
        for plane in reversed(planes):
            high <<= np.uint64(8)
            high += plane
        high += np.uint64(1)
        local = np.cumsum(high)
    if int(local[-1]) > num_elements:
        raise MalformedUpdateError(f"position {int(local[-1]) - 1} in a run of {num_elements} elements")
    local -= np.uint64(1)
    return local.astype(np.uint32)


def _write_differences(writer: StreamWriter, steps: Shaped[np.ndarray, "n"]) -> None:
    signed = steps.view(f"i{steps.itemsize}")
    writer.stream(np.packbits(signed < 0), compress=False)
    beyond_one = np.abs(signed).view(steps.dtype)  # the most negative number is its own absolute value, which is right unsigned
    beyond_one -= steps.dtype.type(1)
    larger = beyond_one != 0
    num_larger = int(np.count_nonzero(larger))
    if num_larger == 0:
        writer.number(0)
        return
    if num_larger <= RARE_SHARE * len(steps):
        writer.number(num_larger << 1 | 1)
        writer.stream(np.packbits(larger))
        beyond_one = beyond_one.take(larger.nonzero()[0]) - steps.dtype.type(1)
    else:
        writer.number(num_larger << 1)
    for plane in _byte_planes(beyond_one):
        writer.stream(plane if plane.any() else plane[:0])


def _read_differences(reader: StreamReader, count: int, bits_dtype: np.dtype) -> Shaped[np.ndarray, "n"]:
    flip = np.unpackbits(_exactly(reader, -(-count // 8)), count=count).astype(bits_dtype)
    kind = reader.number(at_most=count << 1 | 1)
    num_larger, rare = kind >> 1, kind & 1
    if num_larger == 0:
        steps = np.ones(count, bits_dtype)
    elif rare:
        larger = np.unpackbits(_exactly(reader, -(-count // 8)), count=count).view(bool).nonzero()[0]
        if len(larger) != num_larger:
            raise MalformedUpdateError(f"a mask of magnitudes marks {len(larger)}, {num_larger} were announced")
        steps = np.ones(count, bits_dtype)
        steps[larger] = _read_planes(reader, num_larger, bits_dtype, empty_is_zero=True) + bits_dtype.type(2)
    else:
        steps = _read_planes(reader, count, bits_dtype, empty_is_zero=True) + bits_dtype.type(1)
    np.negative(flip, out=flip)  # all ones where the step is down: x ^ ~0 - ~0 is -x, without a branch
    steps ^= flip
    steps -= flip
    return steps


def _byte_planes(bits: Shaped[np.ndarray, "n"]) -> list[UInt8[np.ndarray, "n"]]:
    """Bytes of equal significance together, lowest first: the high ones of weights and differences compress, the low ones not."""
    octets = bits.view(np.uint8).reshape(-1, bits.itemsize)
    return [np.ascontiguousarray(octets[:, i]) for i in range(bits.itemsize)]


def _read_planes(reader: StreamReader, count: int, bits_dtype: np.dtype, *, empty_is_zero: bool) -> Shaped[np.ndarray, "n"]:
    octets = np.zeros((count, bits_dtype.itemsize), np.uint8)
    for i in range(bits_dtype.itemsize):
        plane = reader.stream(max_bytes=count)
        if len(plane) == count:
            octets[:, i] = plane
        elif len(plane) or not empty_is_zero:
            raise MalformedUpdateError(f"a byte plane has {len(plane)} bytes, not {count}")
    return octets.reshape(-1).view(bits_dtype)


def _read_whole(reader: StreamReader, num_elements: int, bits_dtype: np.dtype) -> Shaped[np.ndarray, "n"]:
    if reader.number(at_most=1):
        return _read_planes(reader, num_elements, bits_dtype, empty_is_zero=num_elements == 0)
    raw = _exactly(reader, num_elements * bits_dtype.itemsize)
    return np.frombuffer(raw.data, bits_dtype)
