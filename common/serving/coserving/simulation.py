"""Co-serving in virtual time: the device's own code over emulated engines, hours of traffic in seconds and no machine needed.

Used to derive and to tune the policy, and by tests that need thousands of schedules. It leaves out what only a machine has: the
Python between steps, noise it is not given, and other processes. Invariant: the same inputs give the same result, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from common.clock import FakeClock
from common.serving.coserving.device import ClassOf, CoServedDevice, OnEvent
from common.serving.coserving.events import AdmissionPolicy, Side
from common.serving.engine import StepEngine, StepLimits
from common.traffic.latency import RequestTimes
from common.traffic.streams import RolloutStreams
from common.traffic.trace import TraceRequest
from common.types import Request, SamplingKey, SamplingParams

SERVING_MODEL = "serving"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came of a simulation. Shares are of its whole duration; requests are in order of arrival."""

    requests: tuple[RequestTimes, ...]
    rollout_tokens: int
    duration_s: float
    seconds: dict[str, float]
    commit_s: tuple[float, ...] = ()

    @property
    def serving_share(self) -> float:
        return self.seconds[Side.SERVING] / self.duration_s

    @property
    def rollout_tokens_per_s(self) -> float:
        return self.rollout_tokens / self.duration_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitEvery:
    """A commit of rollout weights each `interval_s`, of pieces that take `slice_s` each."""

    interval_s: float
    num_slices: int
    slice_s: float

    def slices(self, clock: FakeClock) -> Iterator[None]:
        for _ in range(self.num_slices):
            clock.advance(self.slice_s)
            yield


def simulate(
    arrivals: Sequence[TraceRequest],
    engines: dict[Side, StepEngine[Any]],
    policy: AdmissionPolicy,
    clock: FakeClock,
    *,
    duration_s: float,
    streams: RolloutStreams | None,
    limits: dict[Side, StepLimits],
    class_of: ClassOf = lambda _: "any",
    commits: CommitEvery | None = None,
    on_event: OnEvent | None = None,
) -> Simulated:
    """Serve `arrivals` (of [0, duration_s)) and roll out beside them until `duration_s`.

    Args:
        engines: driven by `clock`, which starts where it stands; arrivals count from there.
        streams: None: there is no rollout work.
    """
    device = CoServedDevice(
        engines, policy, clock, limits=limits, serving_model=SERVING_MODEL, class_of=class_of, on_event=on_event
    )
    start_s = clock.now_s()
    end_s = start_s + duration_s
    times: list[RequestTimes] = []
    commit_s: list[float] = []
    num_commits = 0
    for request in streams.start() if streams is not None else ():
        device.add(Side.ROLLOUT, request)
    while clock.now_s() < end_s:
        now_s = clock.now_s()
        while len(times) < len(arrivals) and start_s + arrivals[len(times)].arrival_s <= now_s:
            arrival = arrivals[len(times)]
            arrival_s = start_s + arrival.arrival_s
            device.add(Side.SERVING, _online(arrival, len(times)), arrival_s=arrival_s)
            times.append(
                RequestTimes(arrival_s=arrival_s, prompt_tokens=arrival.prompt_tokens, output_tokens=arrival.output_tokens)
            )
        if commits is not None and start_s + (num_commits + 1) * commits.interval_s <= now_s:
            num_commits += 1
            device.commit(Side.ROLLOUT, lambda: commits.slices(clock))
        turn = device.turn()
        commit_s += [commit.duration_s or 0.0 for commit in turn.commits]
        for side, result in turn.results:
            if side is Side.SERVING:
                for token in result.tokens:
                    times[int(token.request_id)].token_s.append(clock.now_s())
                for completion in result.completions:
                    times[int(completion.request_id)].whole = True
            elif streams is not None:
                for completion in result.completions:
                    device.add(Side.ROLLOUT, streams.next(completion))
        if turn.waits:
            due_s = [end_s]
            due_s += [start_s + arrivals[len(times)].arrival_s] if len(times) < len(arrivals) else []
            due_s += [turn.until_s] if turn.until_s is not None else []
            due_s += [start_s + (num_commits + 1) * commits.interval_s] if commits is not None else []
            clock.advance(max(1e-9, min(due_s) - now_s))
    return Simulated(
        requests=tuple(times),
        rollout_tokens=streams.generated_tokens if streams is not None else 0,
        duration_s=clock.now_s() - start_s,
        seconds={str(kind): seconds for kind, seconds in device.seconds.items()},
        commit_s=tuple(commit_s),
    )


def _online(arrival: TraceRequest, idx: int) -> Request:
    return Request(
        request_id=str(idx),
        prompt_token_ids=(0,) * arrival.prompt_tokens,
        sampling=SamplingParams(max_tokens=arrival.output_tokens),
        key=SamplingKey(run_seed=0, trajectory_id=idx, turn_idx=0),
        priority=1,
    )
