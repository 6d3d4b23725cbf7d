"""Two models of one device behind one front: the engine process's ends of two channels, one for each model.

Online calls come over the serving model's channel, rollouts and control over the other, so neither can reach the other's engine
whatever a caller sends. What the device decided and did is told now and then over the first. Invariant: when the front is gone or
an engine has failed, both ends stop, and the error is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from common.clock import Clock, MonotonicClock
from common.serving.coserving.events import Side
from common.serving.coserving.statistics import DeviceStatistics
from common.serving.front.engine_server import EngineServer

REPORT_S = 0.5
"""Between two reports: far more often than metrics are scraped, and nothing beside the messages of every step."""


async def serve_two_models(
    servers: Mapping[Side, EngineServer], statistics: DeviceStatistics, *, clock: Clock | None = None
) -> None:
    """Answer the front until it is gone.

    Args:
        servers: of both replicas, which are entered.
        statistics: listens to the device.

    Raises:
        EngineClosedError: an engine failed. The front has been told.
    """
    tasks = [asyncio.create_task(server.serve()) for server in servers.values()]
    tasks.append(asyncio.create_task(_report(servers[Side.SERVING], statistics, clock or MonotonicClock())))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _report(server: EngineServer, statistics: DeviceStatistics, clock: Clock) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        server.tell_of_device(statistics.report(clock.now_s()))
