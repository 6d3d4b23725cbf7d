"""Step times: a linear cost is found, its noise is bounded, and nothing is guessed from too little."""

from __future__ import annotations

import numpy as np
import pytest

from common.serving.coserving.step_time import MIN_STEPS, StepFeatures, StepTimePredictor
from common.serving.engine import DecodeEntry, PrefillChunk, StepPlan


def cost_s(features: StepFeatures) -> float:
    return (
        5.5e-3
        + 0.14e-3 * features.prefill_tokens
        + 0.15e-3 * features.decode_tokens
        + 0.7e-6 * features.context_tokens
        + 2e-3 * (features.rounds - 1)
        + 0.4e-3 * features.switched
    )


def random_features(rng: np.random.Generator) -> StepFeatures:
    decode = int(rng.integers(0, 64))
    return StepFeatures(
        prefill_tokens=int(rng.integers(0, 300)),
        decode_tokens=decode,
        context_tokens=decode * int(rng.integers(1, 900)),
        rounds=int(rng.integers(1, 5)),
        switched=bool(rng.integers(2)),
    )


def trained(noise: float, *, steps: int = 400, seed: int = 0) -> tuple[StepTimePredictor, np.random.Generator]:
    rng, predictor = np.random.default_rng(seed), StepTimePredictor()
    for _ in range(steps):
        features = random_features(rng)
        if features.num_tokens:
            predictor.observe(features, cost_s(features) * float(np.exp(rng.normal(0, noise))))
    return predictor, rng


def test_an_exact_cost_is_found() -> None:
    predictor, rng = trained(0.0)
    for features in (random_features(rng) for _ in range(50)):
        assert predictor.expected_s(features) == pytest.approx(cost_s(features), rel=0.01)


def test_a_few_steps_that_were_held_up_for_long_do_not_make_all_others_look_as_long() -> None:
    predictor, rng = trained(0.05)
    features = random_features(rng)
    for _ in range(5):
        predictor.observe(features, 100 * cost_s(features))
    later = random_features(rng)
    assert predictor.error(0.99) > 10
    assert predictor.bound_s(later) <= 3 * predictor.expected_s(later)


def test_the_bound_holds_for_about_its_quantile_and_the_stated_error_is_the_noise() -> None:
    predictor, rng = trained(0.05, steps=1500)
    fresh = [features for features in (random_features(rng) for _ in range(1000)) if features.num_tokens]
    above = np.mean([cost_s(f) * np.exp(rng.normal(0, 0.05)) > predictor.bound_s(f) for f in fresh])
    assert above < 0.05
    assert 0.05 < predictor.error(0.9) < 0.12


def test_a_machine_that_slows_down_is_followed() -> None:
    predictor, rng = trained(0.02, steps=600)
    for _ in range(1500):
        features = random_features(rng)
        if features.num_tokens:
            predictor.observe(features, 1.5 * cost_s(features))
    features = random_features(rng)
    assert predictor.bound_s(features) == pytest.approx(1.5 * cost_s(features), rel=0.1)


def padded_cost_s(features: StepFeatures) -> float:
    """Programs of an engine that pads: no line goes through these."""
    return {128: 20e-3, 512: 50e-3, 2048: 400e-3}[features.context_tokens]


def padded_features(rng: np.random.Generator) -> StepFeatures:
    size = int(rng.choice([128, 512, 2048]))
    return StepFeatures(prefill_tokens=64, decode_tokens=16, context_tokens=size, padding_tokens=int(rng.integers(0, 60)))


def test_shapes_that_come_again_are_expected_to_take_what_they_took_whatever_of_them_is_padding() -> None:
    rng, predictor = np.random.default_rng(0), StepTimePredictor()
    for slower in (1.0, 1.5):
        for _ in range(100):
            features = padded_features(rng)
            predictor.observe(features, slower * padded_cost_s(features) * float(np.exp(rng.normal(0, 0.01))))
        for features in (padded_features(rng) for _ in range(20)):
            assert predictor.expected_s(features) == pytest.approx(slower * padded_cost_s(features), rel=0.03)


def test_a_line_that_fits_badly_does_not_widen_the_bounds_of_shapes_that_are_known() -> None:
    rng, predictor = np.random.default_rng(1), StepTimePredictor()
    for number in range(300):
        known = padded_features(rng)
        predictor.observe(known, padded_cost_s(known) * float(np.exp(rng.normal(0, 0.01))))
        if number % 10 == 0:  # once each: the line is all there is to go by, and goes through none of them
            once = StepFeatures(prefill_tokens=1000 + number, decode_tokens=0, context_tokens=0)
            predictor.observe(once, float(rng.choice([0.01, 1.0])))
    for known in (padded_features(rng) for _ in range(20)):
        assert predictor.bound_s(known) < 1.1 * padded_cost_s(known)
    assert predictor.bound_s(StepFeatures(prefill_tokens=5000, decode_tokens=0, context_tokens=0)) > 2 * predictor.expected_s(
        StepFeatures(prefill_tokens=5000, decode_tokens=0, context_tokens=0)
    )


def test_the_newest_steps_say_that_the_machine_is_slower_before_expectations_do() -> None:
    predictor, rng = trained(0.02)
    assert predictor.drift < 1.1
    for _ in range(8):
        features = random_features(rng)
        predictor.observe(features, 2 * cost_s(features))
    assert predictor.drift > 1.5


def test_shapes_that_never_come_again_are_forgotten_and_the_line_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.serving.coserving.step_time.MAX_SHAPES", 3)
    predictor = StepTimePredictor()
    often = StepFeatures(prefill_tokens=10, decode_tokens=0, context_tokens=0)
    for tokens in range(20, 60):
        rare = StepFeatures(prefill_tokens=tokens, decode_tokens=0, context_tokens=0)
        predictor.observe(rare, 1e-3 * tokens)
        predictor.observe(often, 5e-3)
        assert len(predictor._shapes) <= 3
    assert predictor.expected_s(often) == pytest.approx(5e-3, rel=1e-6)
    assert predictor.expected_s(StepFeatures(prefill_tokens=30, decode_tokens=0, context_tokens=0)) == pytest.approx(30e-3, rel=0.1)


def test_nothing_is_known_before_enough_steps_and_an_empty_step_takes_no_time() -> None:
    predictor = StepTimePredictor()
    empty = StepFeatures(prefill_tokens=0, decode_tokens=0, context_tokens=0)
    for _ in range(MIN_STEPS - 1):
        predictor.observe(StepFeatures(prefill_tokens=8, decode_tokens=0, context_tokens=0), 0.01)
        predictor.observe(empty, 0.5)
    assert not predictor.ready
    assert predictor.expected_s(empty) == 0.0
    assert predictor.error() == float("inf")


def test_features_of_a_plan_count_every_decoded_token_and_its_context() -> None:
    plan = StepPlan(
        step_id=0,
        prefill=(PrefillChunk(request_id="a", slot_idx=0, start=4, num_tokens=10),),
        decode=(
            DecodeEntry(request_id="b", slot_idx=1, context_tokens=100, num_tokens=3),
            DecodeEntry(request_id="c", slot_idx=2, context_tokens=50),
        ),
    )
    assert StepFeatures.of(plan) == StepFeatures(prefill_tokens=10, decode_tokens=4, context_tokens=350, rounds=3)


def test_a_quantile_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"quantile=1\.0"):
        StepTimePredictor(quantile=1.0)
