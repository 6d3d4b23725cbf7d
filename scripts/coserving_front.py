"""The front process of a co-serving benchmark: OpenAI's interface over the device process's channel, on the client's core.

python -m scripts.coserving_front --core=1 --engine_fd=N --ready_file=F   (started by bench_coserving)
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

from absl import flags

from common.serving.front.access import Tokens
from common.serving.front.channel import Channel
from common.serving.front.engine_client import EngineClient
from common.serving.front.front import Front, Limits
from common.serving.front.server import FrontServer, address_of, listen
from scripts import entry
from scripts.coserving_engines import tokenizer

_FLAGS = entry.flags_of(__name__)
_CORE = flags.DEFINE_integer("core", 1, "The core of clients and fronts.", flag_values=_FLAGS)
_ENGINE_FD = flags.DEFINE_integer("engine_fd", None, "Socket to the device process.", flag_values=_FLAGS)
_READY_FILE = flags.DEFINE_string("ready_file", None, "Gets the address when calls are taken.", flag_values=_FLAGS)

MODEL_NAME = "serving"


async def serve(listener: socket.socket) -> None:
    channel = await Channel.over(socket.socket(fileno=_ENGINE_FD.value))
    engine = await EngineClient.connect(channel)
    engine_run = asyncio.create_task(engine.run())
    front = Front.make(engine, tokenizer(), model_name=MODEL_NAME, tokens=Tokens(), limits=Limits())
    server = FrontServer(front, listener)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    ready_file = Path(str(_READY_FILE.value))
    partial = ready_file.with_suffix(".partial")
    partial.write_text(address_of(listener, tls=False))
    partial.rename(ready_file)
    await server.run(engine_run)
    await engine.close()


def main() -> None:
    os.sched_setaffinity(0, {_CORE.value})
    with listen("127.0.0.1", 0) as listener:
        asyncio.run(serve(listener))


if __name__ == "__main__":
    entry.run(main, required=["engine_fd", "ready_file"])
