"""Parked memory: right contents at any time, less memory, and nothing beside it touched."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from common.serving import parking

NUM_BYTES = 48 << 20


def anonymous_bytes() -> int:
    """Memory of this process that no file has."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


def range_of(array: np.ndarray) -> parking.Range:
    return array.ctypes.data, array.nbytes


@pytest.fixture
def array() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, NUM_BYTES, np.uint8)


def test_contents_stay_while_memory_goes_and_comes_back(array: np.ndarray) -> None:
    copy, before = array.copy(), anonymous_bytes()
    moved = sum(parking.park([range_of(array)]))
    assert NUM_BYTES - 2 * parking.PAGE <= moved <= NUM_BYTES
    assert anonymous_bytes() <= before - 0.9 * NUM_BYTES
    np.testing.assert_array_equal(array, copy)
    assert anonymous_bytes() <= before - 0.9 * NUM_BYTES, "reading brings nothing back"
    assert sum(parking.activate([range_of(array)])) == moved
    assert anonymous_bytes() >= before - 0.1 * NUM_BYTES
    np.testing.assert_array_equal(array, copy)


def test_what_is_written_while_parked_stays_and_can_be_parked_again(array: np.ndarray) -> None:
    copy = array.copy()
    for value in (1, 2):
        assert sum(parking.park([range_of(array)]))
        array[10_000_000:10_010_000] = copy[10_000_000:10_010_000] = value
        np.testing.assert_array_equal(array, copy)
        assert sum(parking.activate([range_of(array)]))
        array[::4096] = copy[::4096] = value + 5
        np.testing.assert_array_equal(array, copy)


def test_given_up_in_between_everything_is_still_right(array: np.ndarray) -> None:
    copy = array.copy()
    parked = parking.park([range_of(array)])
    assert sum(itertools.islice(parked, 3)) == 3 * parking.PIECE_BYTES
    parked.close()
    np.testing.assert_array_equal(array, copy)
    activated = parking.activate([range_of(array)])
    next(activated)
    activated.close()
    assert sum(parking.park([range_of(array)])) > 0
    np.testing.assert_array_equal(array, copy)


def test_neighbours_on_shared_pages_are_left_alone(array: np.ndarray) -> None:
    copy, middle = array.copy(), array[5_000_003 : 5_000_003 + (1 << 20)]
    start, num_bytes = range_of(middle)
    for address, size in parking.whole_pages([range_of(middle)]):
        assert address % parking.PAGE == size % parking.PAGE == 0
        assert start <= address < address + size <= start + num_bytes
    assert sum(parking.park([range_of(middle)])) > 0
    middle[:] = 7
    copy[5_000_003 : 5_000_003 + (1 << 20)] = 7
    np.testing.assert_array_equal(array, copy)


def test_ranges_that_overlap_are_moved_once(array: np.ndarray) -> None:
    start, num_bytes = range_of(array)
    whole = parking.whole_pages([(start, num_bytes)])
    overlapping = parking.whole_pages([(start + (1 << 20), num_bytes - (1 << 20)), (start, 2 << 20), (start, num_bytes)])
    assert sum(size for _, size in overlapping) == sum(size for _, size in whole)
    assert parking.whole_pages([(start, 100)]) == []


def test_a_file_that_cannot_grow_is_an_error_and_loses_nothing(array: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, written = array.copy(), itertools.count()
    pwrite = parking.os.pwrite

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        if next(written) == 3:
            raise OSError(28, "No space left on device")
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(parking.os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: parking takes 50 MB in .*set TMPDIR"):
        sum(parking.park([range_of(array)]))
    np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("parked_before", [False, True])
def test_discarded_memory_is_zero_and_usable(array: np.ndarray, parked_before: bool) -> None:
    if parked_before:
        sum(parking.park([range_of(array)]))
        sum(parking.activate([range_of(array)]))
    before = anonymous_bytes()
    discarded = sum(parking.discard([range_of(array)]))
    assert anonymous_bytes() <= before - 0.9 * discarded
    assert int(array[parking.PAGE : -parking.PAGE].max()) == 0
    array[:] = 3
    assert int(array.min()) == 3
