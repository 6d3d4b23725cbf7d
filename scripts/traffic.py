"""OnlineTraffic: the processes that send online traffic to a run's co-serving replicas while it trains.

Each is scripts.traffic_process and writes to WORKDIR/traffic/REPLICA.jsonl and logs/REPLICA.traffic.log. It shares no interpreter
with the learner, which would hold back its clock. Invariant: they begin before training does or the run ends with their own words,
and none outlives the run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from common.config import Config, ReplicaConfig
from common.errors import RoseError
from common.traffic.log import TRAFFIC, read_traffic
from common.traffic.online import online_trace
from scripts import entry
from scripts.fleet import LOGS, PRIVATE
from scripts.traffic_process import GRACE_S

START_TIMEOUT_S = 60.0
END_TIMEOUT_S = GRACE_S + 5.0
POLL_S = 0.1
NUM_LAST_LINES = 5


class TrafficError(RoseError):
    """Online traffic that did not begin, or ended by itself; the text has its own last words."""


class OnlineTraffic:
    """See the module. Does nothing if no traffic is asked for. `stop` it before its rows are read.

    Raises:
        ValueError: the trace cannot be used.
    """

    def __init__(self, config: Config, workdir: Path) -> None:
        self._config, self._folder = config, workdir.resolve()
        self._replicas: list[ReplicaConfig] = []
        if config.coserving.traffic.trace is not None:
            self._replicas = [replica for replica in config.fleet.replicas if replica.coserve]
        if self._replicas:
            online_trace(config)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Blocks until requests are sent to every co-serving replica, all of which must be there.

        Raises:
            TrafficError: a process ends before, or takes too long.
        """
        for replica in self._replicas:
            self._processes[replica.name] = self._begin(self._config, replica)
        self._wait_until_it_flows()

    def _begin(self, config: Config, replica: ReplicaConfig) -> subprocess.Popen[bytes]:
        where = f"--url={replica.address}" if replica.address else f"--ready_file={self._folder / PRIVATE / replica.name}.json"
        token = config.coserving.online_token if replica.address else None
        search = os.pathsep.join([str(entry.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log(replica.name).open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "scripts.traffic_process", *entry.config_arguments(), where),
                    *(f"--out={self._out(replica.name)}", f"--owner_pid={os.getpid()}"),
                    *((f"--online_token={token}",) if token else ()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # Ctrl-C is the run's to handle
            )

    def _wait_until_it_flows(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for name, process in self._processes.items():
            while not self._has_begun(name):
                if process.poll() is not None:
                    raise TrafficError(f"no online traffic for replica {name}: {self._last_words(name)}")
                if time.monotonic() > deadline_s:
                    raise TrafficError(
                        f"no online traffic for replica {name} within {START_TIMEOUT_S:.0f} s; its log: {self._log(name)}"
                    )
                time.sleep(POLL_S)

    def stop(self) -> list[str]:
        """Let requests under way end. Idempotent; returns what went wrong on the way, a line for each replica."""
        wrong = []
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        for name, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_TIMEOUT_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.returncode != 0:
                wrong.append(f"online traffic for replica {name} ended by itself: {self._last_words(name)}")
        self._processes.clear()
        return wrong

    def _has_begun(self, name: str) -> bool:
        """Whether the process has begun a stretch of rows: there may be older ones, of the same run before it was resumed."""
        return any(row["kind"] == "start" and row["pid"] == self._processes[name].pid for row in read_traffic(self._out(name)))

    def _out(self, name: str) -> Path:
        return self._folder / TRAFFIC / f"{name}.jsonl"

    def _log(self, name: str) -> Path:
        return self._folder / LOGS / f"{name}.traffic.log"

    def _last_words(self, name: str) -> str:
        lines = [line for line in self._log(name).read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(lines[-NUM_LAST_LINES:]) or f"it said nothing; its log: {self._log(name)}"
