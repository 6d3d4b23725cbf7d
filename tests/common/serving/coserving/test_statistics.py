"""DeviceStatistics: seconds of levels and work, counts, and values that pass between processes."""

from __future__ import annotations

import msgpack
import pytest

from common.serving.coserving.events import Free, Level, Reason, Record, Serve, Side, StepDone, Wait, Work, WorkDone
from common.serving.coserving.objectives import Objective
from common.serving.coserving.statistics import DeviceReport, DeviceStatistics
from common.serving.coserving.step_time import StepFeatures
from tests.common.serving.coserving.schedules import controller

FREE = Free(serving=None, rollout_waits=False, commit_waits=False, parked=False)
FEATURES = StepFeatures(prefill_tokens=0, decode_tokens=1, context_tokens=1)


def record(now_s: float, level: Level, reason: Reason = Reason.IDLE) -> Record:
    return Record(now_s=now_s, reason=reason, level=level, num_live=0, num_waiting=0)


def statistics() -> DeviceStatistics:
    return DeviceStatistics(controller(Objective(ttft_s=1.0, tpot_s=0.1)))


def test_the_seconds_of_all_levels_are_the_time_since_the_first_decision() -> None:
    sums = statistics()
    for now_s, level in ((10.0, Level.OPEN), (12.0, Level.STOPPED), (13.0, Level.STOPPED), (17.0, Level.IDLE_ONLY)):
        sums.listen(FREE, now_s, (Wait(record=record(now_s, level)),))
    report = sums.report(20.0)
    assert report.level_s == {"open": 2.0, "stopped": 5.0, "idle_only": 3.0}
    assert report.level == "idle_only"
    assert sums.report(21.0).level_s["idle_only"] == 4.0


def test_before_the_first_decision_no_time_has_passed() -> None:
    sums = statistics()
    assert sum(sums.report(100.0).level_s.values()) == 0.0
    sums.listen(FREE, 103.0, (Wait(record=record(103.0, Level.OPEN)),))
    assert sum(sums.report(103.0).level_s.values()) == pytest.approx(3.0)


def test_work_is_counted_and_timed_by_kind() -> None:
    sums = statistics()
    for side, duration_s in ((Side.SERVING, 0.25), (Side.ROLLOUT, 0.5), (Side.ROLLOUT, 0.5)):
        sums.listen(StepDone(side=side, features=FEATURES, duration_s=duration_s, tokens=()), 1.0, ())
    for work in (Work.SLICE, Work.PARK):
        sums.listen(WorkDone(kind=work, duration_s=0.125), 1.0, ())
    report = sums.report(2.0)
    assert report.device_s == {"serving": 0.25, "rollout": 1.0, "slice": 0.125, "park": 0.125, "activate": 0.0}
    assert report.num_done == {"serving": 1, "rollout": 2, "slice": 1, "park": 1, "activate": 0}
    assert report.parked
    sums.listen(WorkDone(kind=Work.SLICE, duration_s=0.1), 2.0, ())
    assert sums.report(2.0).parked
    sums.listen(WorkDone(kind=Work.ACTIVATE, duration_s=0.1), 2.0, ())
    assert not sums.report(2.0).parked


def test_decisions_are_counted_by_kind_and_reason_and_the_report_passes_between_processes() -> None:
    sums = statistics()
    for reason in (Reason.WAITING_PROMPT, Reason.WAITING_PROMPT, Reason.NO_ROLLOUT):
        sums.listen(FREE, 1.0, (Serve(record=record(1.0, Level.OPEN, reason)),))
    report = sums.report(2.0)
    assert report.decisions == {f"serve: {Reason.WAITING_PROMPT}": 2, f"serve: {Reason.NO_ROLLOUT}": 1}
    assert report.step_time_error == {}  # nothing was learnt yet
    assert DeviceReport(**msgpack.unpackb(msgpack.packb(vars(report)))) == report
