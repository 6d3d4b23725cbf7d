"""The torch kernels against their references, on the CPU and, where there is one, on a CUDA device."""

import numpy as np
import pytest
import torch

from rose_gpu.kernels import delta

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]),
]


def pair(dtype: torch.dtype, shape: tuple[int, ...], share: float, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random bit patterns, NaNs included, and a copy in which about `share` of them differ."""
    rng = np.random.default_rng(0)
    width = dtype.itemsize
    old = rng.integers(0, 1 << 8 * width, shape).astype(f"u{width}").view(f"i{width}")
    new = np.where(rng.random(shape) < share, rng.integers(0, 1 << 8 * width, shape).astype(f"u{width}").view(f"i{width}"), old)
    old_tensor, new_tensor = (torch.from_numpy(np.array(x)).reshape(-1).view(dtype).reshape(shape).to(device) for x in (old, new))
    return old_tensor, new_tensor


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "share"), [((1000, 37), 0.02), ((128,), 1.0), ((5, 3, 7), 0.0), ((), 1.0), ((0, 4), 0.5)])
def test_found_changes_equal_the_reference_and_apply_to_the_new_weights(
    dtype: torch.dtype, shape: tuple[int, ...], share: float, device: str
) -> None:
    old, new = pair(dtype, shape, share, device)
    count, positions, bits = delta.find_changes(old, new, capacity=1024)
    for got, expected in zip((count, positions, bits), delta.find_changes_reference(old, new, capacity=1024), strict=True):
        assert torch.equal(got, expected)
    for apply in (delta.apply_changes_reference, delta.apply_changes):
        weights = old.clone()
        for _ in range(2):
            apply(weights, positions, bits)
            assert torch.equal(delta.to_bits(weights), delta.to_bits(new))


def test_more_changes_than_room_are_counted() -> None:
    old, new = pair(torch.bfloat16, (300, 100), 0.5, "cpu")
    count, positions, _ = delta.find_changes(old, new, capacity=1024)
    changed = (delta.to_bits(old) != delta.to_bits(new)).nonzero().reshape(-1)
    assert int(count) == len(changed) > 1024
    assert torch.equal(positions, changed[:1024])


def test_tensors_that_are_not_alike_or_not_contiguous_are_refused() -> None:
    with pytest.raises(ValueError, match="alike"):
        delta.find_changes(torch.zeros(4), torch.zeros(5), capacity=8)
    with pytest.raises(ValueError, match="contiguous"):
        delta.apply_changes(torch.zeros(4, 4).T, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="bytes wide"):
        delta.to_bits(torch.zeros(4, dtype=torch.float64))
