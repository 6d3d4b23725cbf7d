"""What bench_transfer compares with must itself be right: baselines are exact, densities are what they say."""

import numpy as np
import pytest

from scripts import bench_transfer, transfer_baselines, transfer_data


@pytest.mark.parametrize("method", transfer_baselines.METHODS)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_baselines_are_exact(method: str, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_baselines, "PIECE_ELEMENTS", 1000)
    old = transfer_data.random_bits(3500, 0)
    new = old.copy()
    if share:
        transfer_data.step_by_one_code(new, share, np.random.default_rng(1))
    wire = memoryview(b"".join(transfer_baselines.encode(method, old, new)))
    got = old.copy()
    for decoded in transfer_baselines.decode(method, wire, old):
        transfer_baselines.write(decoded, got)
    np.testing.assert_array_equal(got, new)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_steps_have_the_density_asked_for(share: float) -> None:
    old = transfer_data.random_bits(400_000, 0)
    new = old.copy()
    transfer_data.step_by_one_code(new, share, np.random.default_rng(1))
    assert np.mean(old != new) == pytest.approx(share, rel=0.05)
    assert set(np.unique((new - old).view(np.int16))) == {-1, 0, 1}


def test_ours_is_smallest_and_close_to_the_bound() -> None:
    old = {"w": transfer_data.random_bits(1 << 20, 0).view(np.float16).reshape(1024, 1024)}
    new = transfer_data.step_model(old, 0.03, 1)
    ours = bench_transfer.wire_bytes_of_ours(old, new)
    assert ours < min(bench_transfer.wire_bytes_of(method, old, new) for method in transfer_baselines.METHODS)
    assert 8 * ours < 1.25 * bench_transfer.bound_bits(old, new)


def test_entropy_of_a_fair_coin_is_a_bit() -> None:
    assert bench_transfer.entropy_bits(np.array([50, 50, 0])) == pytest.approx(100)
    assert bench_transfer.entropy_bits(np.array([7])) == 0
