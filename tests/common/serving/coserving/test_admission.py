"""The admission rules one by one, on hand-made events."""

from __future__ import annotations

import dataclasses

import pytest

from common.serving.coserving.admission import MAX_REPLANS, AdmissionController, AdmissionSettings
from common.serving.coserving.events import (
    Arrived,
    Decision,
    Do,
    Ended,
    Free,
    Go,
    Level,
    Planned,
    Reason,
    Roll,
    Serve,
    Side,
    StepDone,
    Wait,
    Work,
    WorkDone,
)
from common.serving.coserving.objectives import Objective, Objectives
from common.serving.coserving.step_time import StepFeatures
from tests.common.serving.coserving.schedules import LONGEST_SERVING_STEP, calibrated, controller

OBJECTIVE = Objective(ttft_s=0.4, tpot_s=0.1)
DECODE = StepFeatures(prefill_tokens=0, decode_tokens=1, context_tokens=100)
PREFILL = StepFeatures(prefill_tokens=100, decode_tokens=0, context_tokens=0)
SMALL_ROLLOUT = StepFeatures(prefill_tokens=0, decode_tokens=32, context_tokens=32 * 100)
LARGE_ROLLOUT = StepFeatures(prefill_tokens=900, decode_tokens=48, context_tokens=48 * 100)


def one(decisions: tuple[Decision, ...]) -> Decision:
    (decision,) = decisions
    return decision


def free(policy: AdmissionController, now_s: float, **fields: object) -> Decision:
    event = Free(**{"serving": None, "rollout_waits": True, "commit_waits": False, "parked": False} | fields)
    return one(policy.on_event(event, now_s))


def arrive(policy: AdmissionController, request_id: str, now_s: float, *, first_token_s: float | None = None) -> None:
    event = Arrived(request_id=request_id, model="serving", request_class="any", arrival_s=now_s)
    assert policy.on_event(event, now_s) == ()
    if first_token_s is not None:
        serve_tokens(policy, first_token_s, (request_id, 1))


def serve_tokens(policy: AdmissionController, now_s: float, *tokens: tuple[str, int]) -> None:
    assert policy.on_event(StepDone(side=Side.SERVING, features=DECODE, duration_s=6e-3, tokens=tokens), now_s) == ()


def test_while_a_request_waits_for_its_first_token_serving_runs() -> None:
    policy = calibrated(OBJECTIVE)
    arrive(policy, "a", 10.0, first_token_s=10.1)
    arrive(policy, "b", 10.1)
    decision = free(policy, 10.11, serving=PREFILL)
    assert isinstance(decision, Serve)
    assert decision.record.reason is Reason.WAITING_PROMPT
    assert (decision.record.num_live, decision.record.num_waiting) == (2, 1)


def test_online_requests_are_served_by_their_deadlines_and_one_without_an_objective_is_refused() -> None:
    by_class = {"short": Objective(ttft_s=0.1, tpot_s=0.1), "long": Objective(ttft_s=0.4, tpot_s=0.1)}
    policy = AdmissionController(Objectives(by_model={"serving": by_class}), longest_serving_step=LONGEST_SERVING_STEP)

    def priority(request_class: str, arrival_s: float) -> int:
        return policy.priority_of(Arrived(request_id="a", model="serving", request_class=request_class, arrival_s=arrival_s))

    in_order = [priority("long", 9.7), priority("short", 10.1), priority("short", 10.1001), priority("long", 10.0)]
    assert in_order == sorted(in_order, reverse=True)
    assert len(set(in_order)) == 4
    with pytest.raises(ValueError, match="medium"):
        priority("medium", 10.0)


def test_slack_of_the_tightest_live_request_is_lent_and_named() -> None:
    policy = calibrated(OBJECTIVE)
    arrive(policy, "slow", 9.0, first_token_s=9.5)
    arrive(policy, "fresh", 9.9, first_token_s=9.99)
    serve_tokens(policy, 10.0, ("slow", 10))
    decision = free(policy, 10.0, serving=DECODE)
    assert isinstance(decision, Roll)
    record = decision.record
    assert record.reason is Reason.SLACK
    assert record.tightest_request == "fresh"
    assert record.slack_s is not None
    assert 0 < record.slack_s < 0.6 * OBJECTIVE.tpot_s
    assert free(policy, 10.04, serving=DECODE).record.reason is Reason.NO_SLACK


def test_a_rollout_step_is_bounded_also_when_serving_is_idle() -> None:
    policy = calibrated(OBJECTIVE)
    decision = free(policy, 10.0)
    assert isinstance(decision, Roll)
    assert decision.record.budget_s == pytest.approx(0.35 * OBJECTIVE.ttft_s)
    smaller = one(policy.on_event(Planned(features=LARGE_ROLLOUT), 10.0))
    assert isinstance(smaller, Roll)
    assert smaller.max_tokens < LARGE_ROLLOUT.num_tokens
    go = one(policy.on_event(Planned(features=SMALL_ROLLOUT), 10.0))
    assert isinstance(go, Go)
    assert go.record.rollout_bound_s is not None
    assert go.record.rollout_bound_s <= 0.35 * OBJECTIVE.ttft_s


def test_a_budget_that_fixed_costs_would_eat_goes_to_serving() -> None:
    policy = calibrated(OBJECTIVE, AdmissionSettings(tpot_share=0.2))
    arrive(policy, "a", 9.9, first_token_s=10.0)
    decision = free(policy, 10.0, serving=DECODE)
    assert isinstance(decision, Serve)
    assert decision.record.reason is Reason.NO_SLACK
    assert decision.record.budget_s is not None
    assert decision.record.budget_s > 0


def test_an_idle_device_makes_a_step_smaller_until_it_fits_however_often_that_takes() -> None:
    """An engine that pads: only its smallest program, of at most 8 tokens, is short enough."""
    policy = calibrated(OBJECTIVE)
    decision, asked = free(policy, 10.0), []
    while isinstance(decision, Roll):
        asked.append(decision.max_tokens)
        small = decision.max_tokens <= 8
        features = StepFeatures(
            prefill_tokens=16 if small else 4000,
            decode_tokens=0,
            context_tokens=0,
            padding_tokens=(16 if small else 4000) - min(decision.max_tokens, 4000),
        )
        decision = one(policy.on_event(Planned(features=features), 10.0))
    assert isinstance(decision, Go)
    assert asked == sorted(asked, reverse=True)
    assert len(asked) - 1 > MAX_REPLANS, "while serving waits it would have been given up"


def test_a_step_that_would_mostly_compute_padding_goes_to_serving_until_another_rollout_step_has_run() -> None:
    policy = calibrated(OBJECTIVE)
    full = StepFeatures(prefill_tokens=64, decode_tokens=16, context_tokens=1600, padding_tokens=20)
    for number in range(30):
        assert isinstance(free(policy, number), Roll)
        policy.on_event(Planned(features=full), number)
        policy.on_event(StepDone(side=Side.ROLLOUT, features=full, duration_s=18e-3, tokens=()), number + 0.02)
    arrive(policy, "a", 40.0, first_token_s=40.01)
    for padding, expected in ((40, Go), (60, Serve)):
        assert isinstance(free(policy, 40.011, serving=DECODE), Roll)
        decision = one(policy.on_event(Planned(features=dataclasses.replace(full, padding_tokens=padding)), 40.011))
        assert isinstance(decision, expected)
    assert decision.record.reason is Reason.NO_SLACK
    assert isinstance(free(policy, 40.012, serving=DECODE), Serve)
    policy.on_event(StepDone(side=Side.ROLLOUT, features=full, duration_s=18e-3, tokens=()), 40.03)
    serve_tokens(policy, 40.04, ("a", 1))
    assert isinstance(free(policy, 40.041, serving=DECODE), Roll)
    assert isinstance(one(policy.on_event(Planned(features=full), 40.041)), Go)


def test_slack_that_was_of_no_use_is_tried_again_after_a_while() -> None:
    """Without a rollout step in between, which never comes if serving is never idle."""
    policy = calibrated(OBJECTIVE, AdmissionSettings(probe_after_s=2.0))
    arrive(policy, "a", 10.0, first_token_s=10.01)
    large = StepFeatures(prefill_tokens=900, decode_tokens=48, context_tokens=48 * 1000)
    decision = free(policy, 10.011, serving=DECODE)
    while isinstance(decision, Roll):
        decision = one(policy.on_event(Planned(features=large), 10.011))
    assert isinstance(decision, Serve)
    serve_tokens(policy, 10.5, ("a", 1))
    assert isinstance(free(policy, 10.501, serving=DECODE), Serve)
    serve_tokens(policy, 12.02, ("a", 60))
    assert isinstance(free(policy, 12.021, serving=DECODE), Roll)


def test_a_piece_of_activation_needs_no_more_slack_than_it_takes() -> None:
    policy = calibrated(OBJECTIVE)
    policy.on_event(WorkDone(kind=Work.ACTIVATE, duration_s=1e-3), 9.0)
    arrive(policy, "a", 10.0, first_token_s=10.01)
    late = 10.01 + 0.6 * OBJECTIVE.tpot_s - 0.013  # a budget that a rollout step's fixed costs would eat
    assert isinstance(free(policy, late, serving=DECODE), Serve)
    assert isinstance(free(policy, late, serving=DECODE, parked=True), Do)


def test_the_knob_bounds_how_long_a_token_is_kept_waiting() -> None:
    slack = {}
    for rise in (3.0, 50.0):
        policy = calibrated(OBJECTIVE, AdmissionSettings(max_tpot_rise=rise, max_fixed_share=1.0))
        arrive(policy, "a", 9.9, first_token_s=10.0)
        record = free(policy, 10.0, serving=DECODE).record
        assert record.slack_s is not None
        assert record.serving_bound_s is not None
        slack[rise] = record.slack_s / record.serving_bound_s
    assert slack[3.0] == pytest.approx(2.0)
    assert slack[50.0] > 3


def test_a_first_gap_leaves_room_for_the_longest_serving_step() -> None:
    policy = calibrated(dataclasses.replace(OBJECTIVE, tpot_s=0.06), AdmissionSettings(max_fixed_share=1.0))
    arrive(policy, "a", 9.9, first_token_s=10.0)
    record = free(policy, 10.0, serving=DECODE).record
    longest_s = policy.predictors[Side.SERVING].bound_s(LONGEST_SERVING_STEP)
    assert record.slack_s == pytest.approx(0.06 - longest_s, abs=1e-6)


def test_no_rollout_step_before_step_times_are_known_unless_serving_is_idle() -> None:
    policy = controller(OBJECTIVE)
    arrive(policy, "a", 0.0, first_token_s=0.1)
    assert free(policy, 0.1, serving=DECODE).record.reason is Reason.NOT_CALIBRATED
    policy.on_event(Ended(request_id="a", whole=True), 0.2)
    decision = free(policy, 0.2)
    assert isinstance(decision, Roll)
    assert decision.max_tokens == 1


def test_pieces_of_a_commit_are_admitted_by_their_size_and_keep_rollout_steps_away() -> None:
    policy = calibrated(OBJECTIVE)
    assert free(policy, 9.0, commit_waits=True) == Do(record=free(policy, 9.0, commit_waits=True).record, work=Work.SLICE)
    policy.on_event(WorkDone(kind=Work.SLICE, duration_s=0.01), 9.01)
    arrive(policy, "a", 9.9, first_token_s=10.0)
    small = free(policy, 10.0, serving=DECODE, commit_waits=True)
    assert isinstance(small, Do)
    assert small.record.rollout_bound_s == 0.01
    policy.on_event(WorkDone(kind=Work.SLICE, duration_s=0.2), 10.01)
    assert free(policy, 10.0, serving=DECODE, commit_waits=True).record.reason is Reason.DOES_NOT_FIT
    assert isinstance(free(policy, 10.3, commit_waits=True), Do)


def test_a_parked_model_is_activated_on_demand_and_parked_when_unused() -> None:
    policy = calibrated(OBJECTIVE, AdmissionSettings(park_after_s=5.0))
    nothing = {"rollout_waits": False}
    waits = free(policy, 10.0, **nothing)
    assert isinstance(waits, Wait)
    assert waits.until_s == 15.0
    parks = free(policy, 15.0, **nothing)
    assert isinstance(parks, Do)
    assert (parks.work, parks.record.reason) == (Work.PARK, Reason.UNUSED)
    assert isinstance(free(policy, 15.1, parked=True, **nothing), Wait)
    activates = free(policy, 16.0, parked=True)
    assert isinstance(activates, Do)
    assert activates.work is Work.ACTIVATE
    arrive(policy, "a", 16.0, first_token_s=16.1)
    assert isinstance(free(policy, 16.1, serving=DECODE, parked=True), Serve)  # how long it takes is not known yet
    policy.on_event(WorkDone(kind=Work.ACTIVATE, duration_s=0.02), 16.2)
    policy.on_event(Ended(request_id="a", whole=True), 16.2)
    arrive(policy, "b", 16.2, first_token_s=16.3)
    assert isinstance(free(policy, 16.3, serving=DECODE, parked=True), Do)


def test_surprises_lower_the_level_step_by_step_and_calm_raises_it_again() -> None:
    policy = calibrated(OBJECTIVE)
    settings = policy.settings.caution
    bound_s = policy.predictors[Side.ROLLOUT].bound_s(SMALL_ROLLOUT)
    seen = []
    for number in range(settings.max_surprises):
        bound_s = policy.predictors[Side.ROLLOUT].bound_s(SMALL_ROLLOUT)
        duration_s = 3 * bound_s
        policy.on_event(StepDone(side=Side.ROLLOUT, features=SMALL_ROLLOUT, duration_s=duration_s, tokens=()), 10.0 + 0.1 * number)
        seen.append(free(policy, 10.0 + 0.1 * number).record.level)
    assert seen[settings.cautious_surprises - 1] is Level.IDLE_ONLY
    assert seen[-1] is Level.STOPPED
    stopped = free(policy, 11.2)
    assert isinstance(stopped, Wait)
    assert stopped.until_s is not None
    assert free(policy, stopped.until_s).record.level is Level.IDLE_ONLY
    assert free(policy, stopped.until_s + settings.calm_s).record.level is Level.OPEN


def test_blamed_misses_stop_borrowing_and_misses_of_all_stop_rollouts() -> None:
    policy = calibrated(OBJECTIVE)
    for number in range(policy.settings.caution.cautious_blamed):
        request_id, start_s = f"late{number}", 10.0 + number
        arrive(policy, request_id, start_s)
        policy.on_event(StepDone(side=Side.ROLLOUT, features=SMALL_ROLLOUT, duration_s=0.2, tokens=()), start_s + 0.3)
        serve_tokens(policy, start_s + 0.5, (request_id, 1))  # 0.1 s late; rollouts had 0.2 s of it
        policy.on_event(Ended(request_id=request_id, whole=True), start_s + 0.5)
    assert free(policy, 12.0).record.level is Level.IDLE_ONLY
    policy = calibrated(OBJECTIVE)
    for number in range(policy.settings.caution.window_requests):
        request_id, start_s = f"late{number}", 10.0 + number
        arrive(policy, request_id, start_s, first_token_s=start_s + 0.9)
        policy.on_event(Ended(request_id=request_id, whole=True), start_s + 0.9)
    assert free(policy, start_s + 0.9).record.level is Level.STOPPED


def test_an_idle_device_tries_a_smallest_step_when_none_seems_to_fit() -> None:
    policy = calibrated(Objective(ttft_s=0.015, tpot_s=0.1))
    assert isinstance(free(policy, 10.0), Roll)
    smallest = dataclasses.replace(SMALL_ROLLOUT, decode_tokens=1, context_tokens=100)
    gives_up = one(policy.on_event(Planned(features=smallest), 10.0))
    assert isinstance(gives_up, Wait)
    assert gives_up.record.reason is Reason.DOES_NOT_FIT
    assert gives_up.until_s is not None
    assert isinstance(free(policy, gives_up.until_s), Roll)
    probe = one(policy.on_event(Planned(features=smallest), gives_up.until_s))
    assert isinstance(probe, Go)
    assert probe.record.reason is Reason.PROBE


def test_arrivals_in_between_do_not_put_off_the_smallest_step() -> None:
    policy = calibrated(Objective(ttft_s=0.015, tpot_s=0.1))
    smallest = dataclasses.replace(SMALL_ROLLOUT, decode_tokens=1, context_tokens=100)
    decision: Decision | None = None
    for number in range(21):  # a request every 0.1 s, and an idle moment before each
        now_s = 10.0 + number / 10
        assert isinstance(free(policy, now_s), Roll)
        decision = one(policy.on_event(Planned(features=smallest), now_s))
        if isinstance(decision, Go):
            break
        arrive(policy, f"r{number}", now_s + 0.01, first_token_s=now_s + 0.02)
        free(policy, now_s + 0.02, serving=DECODE)
        policy.on_event(Ended(request_id=f"r{number}", whole=True), now_s + 0.03)
    assert isinstance(decision, Go)
    assert decision.record.reason is Reason.PROBE


def test_a_budget_in_which_no_step_can_be_planned_grows_until_one_can() -> None:
    policy = controller(OBJECTIVE)  # not calibrated: the first budget is one token
    decision = free(policy, 10.0)
    asked = []
    while isinstance(decision, Roll):
        asked.append(decision.max_tokens)
        decision = one(policy.on_event(Planned(features=None), 10.0))
    assert asked[:3] == [1, 2, 4]
    assert asked[-1] == policy.settings.max_step_tokens
    assert isinstance(decision, Wait)


def test_a_model_without_an_objective_is_refused_by_name() -> None:
    policy = AdmissionController(Objectives.of("serving", OBJECTIVE), longest_serving_step=LONGEST_SERVING_STEP)
    with pytest.raises(ValueError, match="no objective for model 'other', only for serving"):
        policy.on_event(Arrived(request_id="a", model="other", request_class="any", arrival_s=0.0), 0.0)


@pytest.mark.parametrize(("name", "value"), [("step_share", 0.0), ("tpot_share", 1.5), ("max_fixed_share", -1.0)])
def test_settings_out_of_range_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        AdmissionSettings(**{name: value})
