"""Send online traffic to one co-serving replica until told to stop, and write down what its clients saw.

    python -m scripts.traffic_process --config=configs/coserve_cpu.py --url=http://127.0.0.1:8000 --out=traffic.jsonl

Replays the slice of the configuration's coserving.traffic over and over, open-loop. SIGTERM or Ctrl-C ends it: nothing more is sent
and what is under way is waited for. Rows are those of common/traffic/log.py; a run of scripts.train that has a co-serving replica
starts this by itself, with --ready_file in place of --url, and makes its report of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from pathlib import Path

from absl import flags

from common.config import Config, serving_config, validate_coserving
from common.errors import RoseError
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import load_task_suite
from common.serving.coserving.objectives import Objective
from common.serving.remote_process import end_with_owner
from common.traffic.log import TrafficLog, device_sums
from common.traffic.online import online_trace, replay_until
from common.traffic.openai_stream import Target, get, served_model
from common.traffic.replay import ReplayOptions
from common.traffic.trace import packaged_traces
from common.transfer.secrets import read_secret
from scripts import entry

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS)
_URL = flags.DEFINE_string("url", None, "Front of the replica, http(s)://HOST:PORT.", flag_values=_FLAGS)
_READY_FILE = flags.DEFINE_string("ready_file", None, "What scripts.serve wrote with --ready_file.", flag_values=_FLAGS)
_TOKEN = flags.DEFINE_string("online_token", None, "API key: file:/path or env:NAME.", flag_values=_FLAGS)
_OUT = flags.DEFINE_string("out", None, "File that rows are appended to.", flag_values=_FLAGS)
_OWNER_PID = flags.DEFINE_integer("owner_pid", None, "End when this process, which must be the parent, ends.", flag_values=_FLAGS)

POLL_S = 1.0
"""Between two looks at what the device did."""
GRACE_S = 15.0
"""For requests that are under way when the traffic is stopped."""


def vocab_size(config: Config) -> int:
    """Of the serving model: prompts are random tokens below it."""
    serving = serving_config(config)
    if serving.model.checkpoint is not None:
        return ChatTokenizer.load(Path(serving.model.checkpoint)).vocab_size
    return ChatTokenizer.from_vocabulary(load_task_suite(serving.env.factory, serving.env.options).vocabulary()).vocab_size


def front_url() -> str:
    """Where the front is now.

    Raises:
        ValueError: neither flag says so.
    """
    if _URL.value is not None:
        return _URL.value
    if _READY_FILE.value is None:
        raise ValueError("give --url=http://HOST:PORT of a co-serving replica, or the --ready_file that it wrote")
    try:
        return str(json.loads(Path(_READY_FILE.value).read_text())["url"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"--ready_file={_READY_FILE.value} has no url of a replica ({error}); is it started?") from error


async def first_target(key: str | None) -> Target:
    """The front as it is at the beginning.

    Raises:
        ValueError: nobody answers there, or not as a server of models does.
    """
    url = front_url()
    try:
        return Target(url=url, model=await served_model(url, key), api_key=key)
    except (RoseError, OSError, KeyError, asyncio.IncompleteReadError) as error:
        raise ValueError(f"the front at {url} cannot be reached: {error}; start scripts.serve --coserve there first") from error


async def poll_device(target_of: list[Target], log: TrafficLog) -> None:
    """Note the device's sums every POLL_S, as far as the front answers."""
    while True:
        with contextlib.suppress(RoseError, OSError, ValueError, asyncio.IncompleteReadError):
            target = target_of[-1]
            sums = device_sums((await get(target.url, "/metrics", target.api_key)).decode())
            if sums is not None:
                log.device(sums)
        await asyncio.sleep(POLL_S)


async def send_traffic(config: Config, log: TrafficLog) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    trace, key = online_trace(config), read_secret(_TOKEN.value).value.decode() if _TOKEN.value else None
    targets = [await first_target(key)]

    def where_it_is_now() -> Target:
        with contextlib.suppress(ValueError):  # it is being started again: its clients fail until it is back
            targets.append(Target(url=front_url(), model=targets[0].model, api_key=key))
        return targets[-1]

    log.start(trace)
    polling = asyncio.create_task(poll_device(targets, log))
    options = ReplayOptions(vocab_size=vocab_size(config), seed=config.coserving.traffic.seed, grace_s=GRACE_S)
    await replay_until(stop, trace, where_it_is_now, options, log.request)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)


def main() -> None:
    config = _CONFIG.value
    validate_coserving(config)
    if _OWNER_PID.value is not None:
        end_with_owner(_OWNER_PID.value)
    coserving = config.coserving
    if coserving.traffic.trace is None:
        raise ValueError(
            f"coserving.traffic.trace is None, so there is nothing to send; name one of {', '.join(packaged_traces())} or a file"
        )
    log = TrafficLog(Path(str(_OUT.value)), Objective(ttft_s=coserving.ttft_s, tpot_s=coserving.tpot_s))
    asyncio.run(send_traffic(config, log))


if __name__ == "__main__":
    entry.run(main, required=["config", "out"])
