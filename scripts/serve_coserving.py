"""The engine process of scripts.serve --coserve: two engines on one device, each with a channel of its own to the front.

Online calls reach the serving model (Config.coserving), rollouts and weights the policy; the executor gives each step of the device
to one of them. Before it says hello, every step's program is compiled and both engines' step times are measured, since what is
unknown is not lent. Like scripts.serve_engine it knows token ids only and serves until the front is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from typing import Any

from common.clock import MonotonicClock
from common.config import Config, SamplerConfig, serving_config
from common.serving.coserving.admission import AdmissionController, AdmissionSettings
from common.serving.coserving.calibration import calibrate
from common.serving.coserving.decision_trace import DecisionTrace
from common.serving.coserving.events import Decision, Event, Side
from common.serving.coserving.executor import CoServingExecutor
from common.serving.coserving.objectives import Objective, Objectives
from common.serving.coserving.statistics import DeviceStatistics
from common.serving.coserving.step_time import StepFeatures
from common.serving.front.channel import Channel
from common.serving.front.engine_server import EngineServer
from common.serving.front.remote_errors import to_wire
from common.serving.front.two_models import serve_two_models
from common.transfer.subscriber import Subscriber
from scripts.entry import is_users, one_line
from scripts.serve_engine import StoreOptions, make_served_replica

SERVING_MODEL = "serving"
"""What the policy of admission calls it: its objectives are found by that."""
TRACE_ENTRIES = 20_000
"""Events that are kept to be shown: those of ten seconds of steps of 2 ms, four a step. Far more would keep the garbage collector
busy, on the event loop that steps."""
TYPICAL_SHARE = 4
"""The longest serving step is thought of as prompts beside a quarter of the slots, with a quarter of the context each."""


def run_two_engines(config: Config, *, replica_id: str, ends: dict[Side, int], store: StoreOptions) -> None:
    """Serve until the front is gone.

    Args:
        ends: file descriptors of the sockets to the front.
        store: where the policy takes weights from.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if config.sampler.backend == "vllm":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX only reads checkpoints; the device is vLLM's
    asyncio.run(_serve(config, replica_id, {side: socket.socket(fileno=end) for side, end in ends.items()}, store))


async def _serve(config: Config, replica_id: str, ends: dict[Side, socket.socket], store: StoreOptions) -> None:
    channels = {side: await Channel.over(end) for side, end in ends.items()}
    try:
        await _serve_both(config, replica_id, channels, store)
    except Exception as error:
        for channel in channels.values():
            channel.send({"kind": "failed", "text": one_line(error) if is_users(error) else to_wire(error)[1]})
            await channel.close()
        if not is_users(error):
            raise
        raise SystemExit(1) from error


async def _serve_both(config: Config, replica_id: str, channels: dict[Side, Channel], store: StoreOptions) -> None:
    policy = admission_of(config)
    statistics = DeviceStatistics(policy)
    trace = DecisionTrace(max_entries=TRACE_ENTRIES)

    def listen(event: Event, now_s: float, decisions: tuple[Decision, ...]) -> None:
        statistics.listen(event, now_s, decisions)
        trace.listen(event, now_s, decisions)

    executor = CoServingExecutor(policy, serving_model=SERVING_MODEL, on_event=listen)
    serving_store = StoreOptions(address=None, token=None, ca=None)
    replicas: dict[Side, Any] = {
        Side.SERVING: make_served_replica(
            serving_config(config), f"{replica_id}.serving", serving_store, drive=executor.drive(Side.SERVING)
        ),
        Side.ROLLOUT: make_served_replica(config, replica_id, store, drive=executor.drive(Side.ROLLOUT)),
    }
    if config.sampler.backend == "jetstream":
        for replica in replicas.values():
            replica.engine.warm_up()  # vLLM on CPU compiles nothing
    learning = admission_of(config)  # a policy of its own: surprises while step times are being learnt are no cause for caution
    calibrate(dict(executor.engines), learning, MonotonicClock(), limits=dict(executor.limits))
    policy.predictors.update(learning.predictors)
    stores = {Side.SERVING: serving_store, Side.ROLLOUT: store}
    async with replicas[Side.SERVING], replicas[Side.ROLLOUT], executor:  # no step is taken once a replica closes its engine
        for side, replica in replicas.items():
            if stores[side].address is None:
                await replica.stage()
                await replica.commit()
        servers = {side: _server(config, channels[side], replica, stores[side], trace) for side, replica in replicas.items()}
        await serve_two_models(servers, statistics)


def _server(config: Config, channel: Channel, replica: Any, store: StoreOptions, trace: DecisionTrace) -> EngineServer:
    timeout_s = config.transfer.timeout_s

    def subscribe(address: str) -> Subscriber:
        return Subscriber(store.open(address, timeout_s), replica.target, receiver_id=replica.replica_id, timeout_s=timeout_s)

    return EngineServer(
        channel, replica, replica.target, info=replica.engine.info, subscribe=subscribe, store=store.address, decisions=trace
    )


def admission_of(config: Config) -> AdmissionController:
    """The policy that a configuration describes."""
    coserving = config.coserving
    settings = AdmissionSettings(
        spend_slack=coserving.spend_slack,
        step_share=coserving.step_share,
        max_tpot_rise=coserving.max_tpot_rise,
        max_step_tokens=config.sampler.max_step_tokens,
        park_after_s=coserving.park_after_s,
    )
    objective = Objective(ttft_s=coserving.ttft_s, tpot_s=coserving.tpot_s)
    return AdmissionController(
        Objectives.of(SERVING_MODEL, objective), settings, longest_serving_step=longest_step(coserving.sampler)
    )


def longest_step(sampler: SamplerConfig) -> StepFeatures:
    """The largest step that an engine's limits allow, as far as it occurs: see TYPICAL_SHARE."""
    num_decoding = max(1, sampler.max_slots // TYPICAL_SHARE)
    return StepFeatures(
        prefill_tokens=max(0, sampler.max_step_tokens - num_decoding),
        decode_tokens=num_decoding,
        context_tokens=num_decoding * sampler.max_context_tokens // TYPICAL_SHARE,
        switched=True,
    )
