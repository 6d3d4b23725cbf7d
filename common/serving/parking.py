"""Parking: memory that is not needed for a while goes to a file, at the same addresses and with the same contents.

The whole pages of a range are written to an unlinked file that is then mapped in their place, privately: who reads meanwhile reads
right values from the file, who writes gets pages of memory of his own, and nothing that points there has to know. `activate` makes
all pages memory again before they are needed. For ordinary memory of this process (numpy, torch and JAX on CPU), not for shared or
device memory. The file is in the system's folder for temporary files, and takes its room there until the memory is freed or parked
anew; on a tmpfs nothing is won. Both go piece by piece, so that other work can come in between; giving up in between is safe.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator

PIECE_BYTES = 4 << 20
"""Moved at a time: some milliseconds."""
PAGE = mmap.PAGESIZE
MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x02, 0x10, 0x20
MADV_POPULATE_WRITE = 23

Range = tuple[int, int]
"""Address and bytes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def whole_pages(ranges: Iterable[Range]) -> list[Range]:
    """The pages that lie within the ranges altogether, as disjoint ranges of at most PIECE_BYTES."""
    pieces: list[Range] = []
    last_end = 0
    for address, num_bytes in sorted(ranges):
        start = max(last_end, -(-address // PAGE) * PAGE)
        end = (address + num_bytes) // PAGE * PAGE
        pieces += [(piece, min(PIECE_BYTES, end - piece)) for piece in range(start, end, PIECE_BYTES)]
        last_end = max(last_end, end)
    return pieces


def park(ranges: Iterable[Range]) -> Iterator[int]:
    """Move ranges to a file; yields the bytes of each piece. Nobody may write to them until it is done.

    Raises:
        OSError: the file cannot hold them; what was moved stays so, and all contents are right.
    """
    pieces = whole_pages(ranges)
    with tempfile.TemporaryFile(prefix="rose_parked_") as file:
        offset = 0
        for address, num_bytes in pieces:
            content = memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")
            written = 0
            while written < num_bytes:
                try:
                    written += os.pwrite(file.fileno(), content[written:], offset + written)
                except OSError as error:
                    needed = f"parking takes {sum(size for _, size in pieces) / 1e6:.0f} MB in {tempfile.gettempdir()}"
                    raise OSError(error.errno, f"{error.strerror}: {needed}; make room there or set TMPDIR") from error
            _map(address, num_bytes, 0, file.fileno(), offset)
            offset += num_bytes
            yield num_bytes


def activate(ranges: Iterable[Range]) -> Iterator[int]:
    """Make parked ranges memory again; yields the bytes of each piece. Those that are already are not touched.

    Raises:
        OSError: there is not enough memory; contents are right all the same.
    """
    for address, num_bytes in whole_pages(ranges):
        # A kernel before 5.14 does not know the advice (EINVAL): there pages become memory one by one, as they are used.
        if _libc.madvise(address, num_bytes, MADV_POPULATE_WRITE) and ctypes.get_errno() != errno.EINVAL:
            raise _os_error("madvise", num_bytes)
        yield num_bytes


def discard(ranges: Iterable[Range]) -> Iterator[int]:
    """Give back memory whose contents nobody needs; yields the bytes of each piece. It is zero, and memory again, once used."""
    for address, num_bytes in whole_pages(ranges):  # new pages: after MADV_DONTNEED what was parked once would show its file again
        _map(address, num_bytes, MAP_ANONYMOUS, -1, 0)
        yield num_bytes


def _map(address: int, num_bytes: int, kind: int, descriptor: int, offset: int) -> None:
    """New pages in place of those at an address."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _libc.mmap(address, num_bytes, protection, MAP_PRIVATE | MAP_FIXED | kind, descriptor, offset)
    if found != address:
        raise _os_error("mmap", num_bytes)


def _os_error(call: str, num_bytes: int) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{os.strerror(number)}: {call} of {num_bytes} bytes; the system has no memory or mappings to spare")
