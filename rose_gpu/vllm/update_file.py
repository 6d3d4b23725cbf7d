"""A staged update as one file, for workers in other processes: they map it and take what is theirs.

Reads only what it wrote; a file that is too short or does not parse is a ValueError. Nothing is pickled.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from common.transfer.bits import BITS_DTYPES
from common.transfer.layout_wire import parse_layout
from common.transfer.staging import StagedRun, StagedUpdate

_ALIGNMENT = 64
_LENGTH_BYTES = 8


def write_update(update: StagedUpdate, path: Path) -> None:
    """Write values and places; the fingerprints stay behind, they were checked when the update was staged."""
    arrays: list[np.ndarray] = []
    end = 0

    def place(array: np.ndarray) -> list[int]:
        nonlocal end
        start = end
        arrays.append(array)
        end = start + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        return [start, len(array)]

    runs = [[run, place(staged.bits), None if staged.local is None else place(staged.local)] for run, staged in update.runs.items()]
    header = {
        "layout": update.layout.json_bytes.decode(),
        "lineage": update.lineage,
        "base_version": update.base_version,
        "version": update.version,
        "runs": runs,
        "data_bytes": end,
    }
    head = json.dumps(header).encode()
    head += b" " * (-(len(head) + _LENGTH_BYTES) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(_LENGTH_BYTES, "little") + head)
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
            file.write(bytes(-array.nbytes % _ALIGNMENT))


def read_update(path: Path) -> StagedUpdate:
    """The update, its arrays mapped read-only.

    Raises:
        ValueError: not a whole file of `write_update`.
    """
    try:
        content = np.memmap(path, np.uint8, "c")  # private: never written, but torch warns of read-only arrays
        head_bytes = int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
        data = _LENGTH_BYTES + head_bytes
        header = json.loads(content[_LENGTH_BYTES:data].tobytes())
        if len(content) != data + header["data_bytes"]:
            raise ValueError(f"{len(content)} bytes of {data + header['data_bytes']}")
        layout = parse_layout(header["layout"].encode())
        update = StagedUpdate(layout, header["lineage"], header["base_version"], header["version"])
        for run, (bits_at, num_bits), local in header["runs"]:
            tensor_idx, run_idx = layout.locate(run)
            dtype = BITS_DTYPES[layout.tensors[tensor_idx].dtype]
            bits = content[data + bits_at :][: num_bits * dtype.itemsize].view(dtype)
            positions = None if local is None else content[data + local[0] :][: local[1] * 4].view(np.uint32)
            update.runs[run] = StagedRun(layout.tensors[tensor_idx], run_idx, positions, bits)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a whole staged update: {error}; write it again") from error
    return update
