"""ReplicaFleet over real child processes that serve the fake engine: they are killed, hang and fail while rollouts go on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from common.clock import MonotonicClock
from common.errors import ReplicaUnavailableError, RequestRejectedError
from common.rollout.fleet import ReplicaFleet
from common.serving.fake_model import make_weights
from common.serving.remote import RemoteAddress, RemoteReplica, TimeLimits
from common.serving.remote_process import AttachedReplica, ProcessFiles, ReplicaFailedError, ReplicaProcess
from common.transfer.errors import TransferError
from common.transfer.publisher import Publisher
from common.transfer.secrets import Secret, read_secret
from common.transfer.store.http_server import StoreServer
from common.transfer.store.memory import MemoryStore
from common.types import Completion, Request, SamplingKey, SamplingParams
from tests.common.serving.fake_replica import VOCAB_SIZE, fake_server

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0


class Farm:
    """A learner's store behind HTTP, and origins of fake replicas that take weights from it."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder, self.news = folder, list[str]()
        for kind in ("store", "rollout", "control"):
            path = folder / kind
            path.write_text(f"{kind}-token-of-these-tests")
            path.chmod(0o600)
        self.store = MemoryStore()
        self.server = StoreServer(self.store, token=self.secret("store"))
        stack.callback(self.server.close)
        self.publisher = Publisher(self.store)
        stack.callback(self.publisher.close)

    def secret(self, kind: str) -> Secret:
        return read_secret(f"file:{self.folder / kind}")

    def connect(self, name: str, **limits: float) -> Callable[[str], RemoteReplica]:
        def connect(url: str) -> RemoteReplica:
            address = RemoteAddress(url=url, rollout_token=self.secret("rollout"), control_token=self.secret("control"))
            return RemoteReplica(name, address, limits=TimeLimits(**limits), store=self.server.url)

        return connect

    def process(self, name: str, *arguments: str, generate_s: float = TIMEOUT_S) -> ReplicaProcess:
        ready = self.folder / f"{name}.json"
        command = [sys.executable, "-m", "tests.common.serving.fake_replica", f"--store={self.server.url}"]
        command += [f"--{kind}_token=file:{self.folder / kind}" for kind in ("store", "rollout", "control")]
        return ReplicaProcess(
            name,
            [*command, f"--ready_file={ready}", *arguments],
            ProcessFiles(log=self.folder / "logs" / f"{name}.log", ready=ready),
            self.connect(name, generate_s=generate_s),
            environment={"PYTHONPATH": str(ROOT)},
            start_timeout_s=TIMEOUT_S,
        )

    def fleet(self, *origins: Any, **options: Any) -> ReplicaFleet:
        return ReplicaFleet(origins, on_news=self.news.append, **options)

    def publish(self, version: int) -> dict[str, Any]:
        weights = make_weights(version, VOCAB_SIZE)
        self.publisher.publish(version, weights).result()
        return dict(weights)

    @contextlib.asynccontextmanager
    async def running(self, *origins: Any, **options: Any) -> AsyncIterator[ReplicaFleet]:
        """A fleet that serves version 1."""
        self.publish(1)
        async with self.fleet(*origins, **options) as fleet:
            await fleet.stage(1)
            await fleet.commit()
            yield fleet

    async def until_said(self, text: str) -> None:
        while not any(text in news for news in self.news):
            await asyncio.sleep(0.01)


@pytest.fixture
def farm(tmp_path: Path) -> Any:
    with contextlib.ExitStack() as stack:
        yield Farm(tmp_path, stack)


def request(number: int, *, max_tokens: int = 20) -> Request:
    return Request(
        request_id=f"q{number}",
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(max_tokens=max_tokens),
        key=SamplingKey(run_seed=5, trajectory_id=number, turn_idx=0),
    )


async def generate(fleet: ReplicaFleet, num: int) -> list[Completion]:
    return await asyncio.gather(*(fleet.generate(request(number)) for number in range(num)))


def tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, timeout=TIMEOUT_S))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_turn_cut_off_by_a_replicas_end_is_played_elsewhere_and_the_replica_comes_back(farm: Farm, how: signal.Signals) -> None:
    async def work() -> None:
        doomed = farm.process("doomed", "--step_s=0.02")
        async with farm.running(doomed, farm.process("other")) as fleet:
            undisturbed = tokens(await generate(fleet, 12))
            assert all(each.sampled_tokens > 0 for each in fleet.counters_by_replica.values())
            assert fleet.counters.sampled_tokens == sum(map(len, undisturbed))
            await fleet.update_counters()
            assert all(each.num_steps > 0 for each in fleet.counters_by_replica.values())
            calls = asyncio.create_task(generate(fleet, 12))
            while not fleet._members[0].num_in_flight:
                await asyncio.sleep(0)
            assert doomed.pid is not None
            os.kill(doomed.pid, how)
            completions = await calls
            assert tokens(completions) == undisturbed
            assert [completion.request_id for completion in completions] == [f"q{number}" for number in range(12)]
            await farm.until_said("doomed has caught up and serves version 1")
            farm.publish(2)
            await fleet.stage(2)
            assert await fleet.commit() == 2
            before = fleet.counters_by_replica["doomed"].sampled_tokens
            assert {version for completion in await generate(fleet, 12) for version in completion.weight_versions} == {2}
            assert fleet.counters_by_replica["doomed"].sampled_tokens > before
        lost = next(news for news in farm.news if news.startswith("Lost"))
        assert "replica doomed" in lost
        assert how is signal.SIGTERM or "ended by SIGKILL" in lost

    run(work())


@pytest.mark.slow
def test_a_replica_that_comes_back_between_versions_takes_the_newest_from_the_store(farm: Farm) -> None:
    async def work() -> None:
        doomed = farm.process("doomed")
        async with farm.running(doomed, farm.process("other")) as fleet:
            assert doomed.pid is not None
            os.kill(doomed.pid, signal.SIGKILL)
            await farm.until_said("Lost replica doomed")
            for version in (2, 3):
                farm.publish(version)
                await fleet.stage(version)
                assert await fleet.commit() == version
            await farm.until_said("doomed has caught up and serves version 3")
            assert {version for completion in await generate(fleet, 8) for version in completion.weight_versions} == {3}

    run(work())


@pytest.mark.slow
def test_a_version_waits_for_the_next_life_of_an_only_replica_that_dies_before_or_within_its_arrival(farm: Farm) -> None:
    async def work() -> None:
        only = farm.process("only")
        async with farm.running(only) as fleet:
            farm.publish(2)
            assert only.pid is not None
            os.kill(only.pid, signal.SIGKILL)  # as while the learner updates: nobody has seen it when the version comes
            assert (await fleet.stage(2)).version == 2
            os.kill(only.pid, signal.SIGKILL)
            assert await fleet.commit() == 2
            assert {version for each in await generate(fleet, 4) for version in each.weight_versions} == {2}
        assert sum(news.startswith("Lost replica only") for news in farm.news) == 2

    run(work())


@pytest.mark.slow
def test_a_replica_that_answers_nothing_any_more_is_started_again(farm: Farm) -> None:
    async def work() -> None:
        stuck = farm.process("stuck", generate_s=1.0)
        async with farm.running(stuck, farm.process("other")) as fleet:
            undisturbed = tokens(await generate(fleet, 8))
            assert stuck.pid is not None
            os.kill(stuck.pid, signal.SIGSTOP)
            assert tokens(await generate(fleet, 8)) == undisturbed
            os.kill(stuck.pid, signal.SIGKILL)  # it hears no SIGTERM, and the test need not wait for that
            await farm.until_said("stuck has caught up")
        assert any("nothing within 1 s" in news for news in farm.news)

    run(work())


def test_a_replica_that_does_not_come_up_ends_the_start_with_its_last_words(farm: Farm) -> None:
    async def work() -> None:
        other = farm.process("other")
        with pytest.raises(ReplicaFailedError, match=r"(?s)replica broken.*ended with status 1.*no such device"):
            async with farm.fleet(other, farm.process("broken", "--refuse=no such device: tpu7")):
                raise AssertionError("it must not start")
        assert other.pid is not None
        assert not is_running(other.pid)

    run(work())


def test_a_command_that_the_system_cannot_run_is_told_as_the_replicas_failure(farm: Farm) -> None:
    async def work() -> None:
        nowhere = farm.process("nowhere")
        nowhere._command[0] = str(farm.folder / "no-python")
        with pytest.raises(ReplicaFailedError, match=r"replica nowhere: .*No such file.*no-python.*; it was not started"):
            async with farm.fleet(nowhere):
                raise AssertionError("it must not start")

    run(work())


def test_a_log_that_somebody_removed_is_missed_by_nobody(farm: Farm) -> None:
    async def work() -> None:
        broken = farm.process("broken", "--refuse=no such device: tpu7")
        with pytest.raises(ReplicaFailedError):
            await broken.start()
        (farm.folder / "logs" / "broken.log").unlink()
        assert re.fullmatch(r"process \d+ ended with status 1 \(log: .*broken.log\)", await broken.stop())

    run(work())


def test_a_drain_waits_for_turns_without_a_slot_until_their_callers_give_up(farm: Farm) -> None:
    async def work() -> None:
        fleet = farm.fleet(farm.process("never_started"))
        fleet._version = 1
        calls = [asyncio.create_task(fleet.generate(request(number))) for number in range(2)]
        while len(fleet._waiting) < 2:
            await asyncio.sleep(0)
        drained = asyncio.create_task(fleet.drain())
        for call in calls:
            for _ in range(20):
                fleet._tell()  # as when a replica comes or goes, which gives them no slot
                await asyncio.sleep(0)
            assert not drained.done()
            call.cancel()
        await drained
        assert all(call.cancelled() for call in calls)

    run(work())


def test_when_no_replica_is_left_whatever_waits_fails_with_the_reasons(farm: Farm) -> None:
    async def work() -> None:
        first, second = farm.process("first", "--step_s=0.02"), farm.process("second", "--step_s=0.02")
        async with farm.running(first, second, max_restarts=0) as fleet:
            calls = [asyncio.create_task(fleet.generate(request(number))) for number in range(30)]
            while sum(member.num_in_flight for member in fleet._members) < 8:
                await asyncio.sleep(0)
            for process in (first, second):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGKILL)
            for end in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(end, ReplicaFailedError | Completion)
            assert isinstance(await asyncio.gather(fleet.generate(request(31)), return_exceptions=True), list)
            with pytest.raises(ReplicaFailedError, match=r"(?s)no replica is left.*first.*SIGKILL.*second.*SIGKILL"):
                await fleet.stage(1)

    run(work())


@pytest.mark.slow
def test_restarts_are_bounded(farm: Farm) -> None:
    async def work() -> None:
        dying = farm.process("dying")
        async with farm.running(dying, farm.process("other"), max_restarts=1) as fleet:
            for _ in range(2):
                while fleet._members[0].version != 1:
                    await asyncio.sleep(0.01)
                assert dying.pid is not None
                os.kill(dying.pid, signal.SIGKILL)
                while fleet._members[0].replica is not None:
                    await asyncio.sleep(0.01)
            await farm.until_said("Given up: replica dying")
            assert len(await generate(fleet, 8)) == 8
        assert sum(news.startswith("Lost replica dying") for news in farm.news) == 1

    run(work())


def test_a_request_that_can_never_run_is_not_taken_for_a_lost_replica(farm: Farm) -> None:
    async def work() -> None:
        async with farm.running(farm.process("only")) as fleet:
            with pytest.raises(RequestRejectedError, match="64"):
                await fleet.generate(request(0, max_tokens=500))
            assert len(await generate(fleet, 4)) == 4
        assert farm.news == []

    run(work())


def test_a_version_that_cannot_be_staged_is_an_error_and_the_one_before_is_served_on(farm: Farm) -> None:
    async def work() -> None:
        async with farm.running(farm.process("only")) as fleet:
            with pytest.raises(TransferError, match="version 9"):
                await fleet.stage(9)
            assert {version for each in await generate(fleet, 4) for version in each.weight_versions} == {1}
            farm.publish(2)
            await fleet.stage(2)
            assert await fleet.commit() == 2

    run(work())


@pytest.mark.slow
def test_live_weights_are_compared_bit_by_bit_on_every_replica(farm: Farm) -> None:
    weights = farm.publish(1)
    fleet = farm.fleet(farm.process("first"), farm.process("second"))
    with asyncio.Runner() as runner:
        runner.run(fleet.__aenter__())
        try:
            runner.run(fleet.stage(1))
            runner.run(fleet.commit())
            assert fleet.differing_tensors(weights) == []
            name = sorted(weights)[0]
            other = weights | {name: weights[name] + 1}
            assert fleet.differing_tensors(other) == [f"first/{name}", f"second/{name}"]
        finally:
            runner.run(fleet.__aexit__())


@pytest.mark.slow
def test_draining_lets_turns_end_and_refuses_new_ones(farm: Farm) -> None:
    async def work() -> None:
        async with farm.running(farm.process("only", "--step_s=0.01")) as fleet:
            calls = asyncio.create_task(generate(fleet, 6))
            while not fleet._members[0].num_in_flight:
                await asyncio.sleep(0)
            await fleet.drain()
            assert len(await calls) == 6
            with pytest.raises(ReplicaUnavailableError, match="draining"):
                await fleet.generate(request(9))
            await fleet.resume()
            assert len(await generate(fleet, 2)) == 2

    run(work())


def test_replicas_are_attached_to_by_address_and_left_running(farm: Farm, tmp_path: Path) -> None:
    async def work() -> None:
        process = farm.process("there")
        there = await process.start()
        url = there._address.url
        try:
            async with farm.running(AttachedReplica("attached", url, farm.connect("attached"))) as fleet:
                assert len(await generate(fleet, 4)) == 4
            assert process.pid is not None
            assert is_running(process.pid)
        finally:
            await process.stop()

    run(work())


def test_an_attached_replica_may_be_away_for_a_while_once_it_was_there(tmp_path: Path) -> None:
    with fake_server(tmp_path) as server:

        def attached(urls: list[str], **options: float) -> AttachedReplica:
            addresses = [dataclasses.replace(server.address, url=url) for url in urls]
            return AttachedReplica("away", server.url, lambda _: RemoteReplica("away", addresses.pop(0)), **options)

        async def start_and_stop(origin: AttachedReplica, num_times: int) -> None:
            for _ in range(num_times):
                assert not (await origin.start()).load().draining
                await origin.stop()

        async def work() -> None:
            nobody = "http://127.0.0.1:9"
            for origin in (attached([nobody], return_timeout_s=TIMEOUT_S), attached([server.url, nobody])):
                with pytest.raises(ReplicaFailedError, match=f"replica away at {nobody} cannot be reached"):
                    await start_and_stop(origin, 2)
            await start_and_stop(attached([server.url, nobody, nobody, server.url], return_timeout_s=TIMEOUT_S), 2)

        run(work())


@pytest.mark.slow
def test_turns_on_an_attached_replica_that_hangs_do_not_wait_for_their_own_time_limit(farm: Farm) -> None:
    async def work() -> None:
        process = farm.process("there")
        url = (await process.start())._address.url
        stuck = AttachedReplica("stuck", url, farm.connect("stuck", generate_s=10 * TIMEOUT_S, status_s=0.5))
        try:
            async with farm.running(stuck, farm.process("other"), max_restarts=0) as fleet:
                undisturbed = tokens(await generate(fleet, 8))
                assert process.pid is not None
                os.kill(process.pid, signal.SIGSTOP)
                assert tokens(await generate(fleet, 8)) == undisturbed
            assert any("Given up: replica stuck" in news and "nothing within 0.5 s" in news for news in farm.news)
        finally:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGCONT)
            await process.stop()

    run(work())


OWNER = """
import asyncio, sys, pathlib
from common.serving.remote_process import ProcessFiles, ReplicaProcess
folder = pathlib.Path(sys.argv[1])
code = "import os, sys, time; from common.serving.remote_process import end_with_owner;"
code += "end_with_owner(int(sys.argv[-1].partition('=')[2])); print(os.getpid(), flush=True); time.sleep(600)"
files = ProcessFiles(log=folder / "log", ready=folder / "ready")
process = ReplicaProcess("r", [sys.executable, "-c", code], files, lambda url: None, start_timeout_s=600)
asyncio.run(process.start())
"""


def test_a_process_does_not_outlive_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT)
    log, clock = tmp_path / "log", MonotonicClock()
    deadline_s = clock.now_s() + TIMEOUT_S
    try:
        while not (log.exists() and log.read_text().splitlines()[1:]):
            assert clock.now_s() < deadline_s
        pid = int(log.read_text().splitlines()[1])
        assert is_running(pid)
    finally:
        owner.kill()
        owner.wait()
    while is_running(pid):
        assert clock.now_s() < deadline_s


def test_a_wrong_token_ends_the_start_and_says_so(farm: Farm, tmp_path: Path) -> None:
    async def work() -> None:
        with fake_server(tmp_path / "elsewhere") as server:
            origin = AttachedReplica("foreign", server.url, farm.connect("foreign"))
            with pytest.raises(ReplicaFailedError, match="API key"):
                async with farm.fleet(origin):
                    raise AssertionError("it must not start")

    run(work())
