"""Serve one replica: OpenAI's HTTP interface, JetStream's gRPC service, and the interface of rollouts and weights.

    python -m scripts.serve --config=configs/frozenlake_cpu.py --model=runs/frozenlake_cpu/model --backend=jetstream --port=8000

Without --model it serves what the config names, else a small random model made of the environment's words; what it serves is the
first line it prints. With --store it starts without weights and takes them from there when it is told to (/control/v1/stage and
commit). This process is the front: HTTP, gRPC, text and templates. The engine is a process of its own, the same command with
--engine_fd, which sees token ids only; when either ends, so does the other. SIGTERM lets what is under way finish, a second one
ends it at once.

With --coserve the device has two models: that of the configuration's `coserving` section answers online clients under latency
objectives, and the configuration's own model, the policy, runs rollouts in the gaps and takes the weights. docs/coserving.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from common.config import Config, serving_config, validate, validate_coserving
from common.rollout.chat import ChatTokenizer
from common.rollout.environment import load_task_suite
from common.serving.coserving.events import Side
from common.serving.front.access import Tokens
from common.serving.front.front import Front, Limits
from common.serving.front.server import FrontServer, address_of, allow_many_connections, listen
from common.serving.remote_process import end_with_owner
from common.transfer.secrets import read_secret, server_tls
from scripts import entry
from scripts.engine_process import EngineProcess

_FLAGS = entry.flags_of(__name__)
_CONFIG = entry.define_config_flag(_FLAGS)
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder to serve; default: model.checkpoint.", flag_values=_FLAGS)
_BACKEND = flags.DEFINE_enum(
    "backend", None, ["jetstream", "vllm"], "Engine; default: sampler.backend of the config.", flag_values=_FLAGS
)
_STORE = flags.DEFINE_string(
    "store", None, "Start without weights and take them from here: http(s)://HOST:PORT or a folder.", flag_values=_FLAGS
)
_STORE_TOKEN = flags.DEFINE_string("store_token", None, "Token of HTTP stores: file:/path or env:NAME.", flag_values=_FLAGS)
_STORE_CA = flags.DEFINE_string("store_ca", None, "Certificate authority of https stores.", flag_values=_FLAGS)
_NAME = flags.DEFINE_string("model_name", None, "What clients call the model; default: its folder's name.", flag_values=_FLAGS)
_REPLICA_ID = flags.DEFINE_string("replica_id", "replica", "Name of this replica in reports and stores.", flag_values=_FLAGS)
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; other than loopback needs tokens.", flag_values=_FLAGS)
_PORT = flags.DEFINE_integer("port", 8000, "Port of HTTP; 0: any free one.", flag_values=_FLAGS)
_GRPC_PORT = flags.DEFINE_integer("grpc_port", None, "Port of JetStream's gRPC service; none without it.", flag_values=_FLAGS)
_READY_FILE = flags.DEFINE_string("ready_file", None, "Written as JSON when calls are taken: addresses, pids.", flag_values=_FLAGS)
_ONLINE = flags.DEFINE_multi_string("online_token", [], "API key of online clients: file:/path or env:NAME.", flag_values=_FLAGS)
_ROLLOUT = flags.DEFINE_string("rollout_token", None, "Token of /rollout: file:/path or env:NAME.", flag_values=_FLAGS)
_CONTROL = flags.DEFINE_string("control_token", None, "Token of /control: file:/path or env:NAME.", flag_values=_FLAGS)
_CERTIFICATE = flags.DEFINE_string("tls_certificate", None, "Certificate chain (PEM): serve TLS.", flag_values=_FLAGS)
_KEY = flags.DEFINE_string("tls_key", None, "Its private key (PEM).", flag_values=_FLAGS)
_MAX_BODY = flags.DEFINE_integer("max_body_bytes", Limits.max_body_bytes, "Largest body.", flag_values=_FLAGS)
_MAX_PROMPT = flags.DEFINE_integer("max_prompt_tokens", None, "Longest prompt; default: the context.", flag_values=_FLAGS)
_MAX_PER_CLIENT = flags.DEFINE_integer(
    "max_completions_per_client", Limits.max_completions_per_client, "Completions of one client at a time.", flag_values=_FLAGS
)
_STEP_TOKENS = flags.DEFINE_integer(
    "tokens_per_step", 1, "Tokens of a sequence in one step of jetstream: more are faster and arrive in lumps.", flag_values=_FLAGS
)
_COSERVE = flags.DEFINE_bool(
    "coserve", False, "Serve the model of config.coserving online, the policy (--model) to rollouts.", flag_values=_FLAGS
)
_WARM_UP = flags.DEFINE_bool("warm_up", True, "Compile every step's program before the first call.", flag_values=_FLAGS)
_OWNER_PID = flags.DEFINE_integer("owner_pid", None, "End when this process, which must be the parent, ends.", flag_values=_FLAGS)
_ENGINE_FD = flags.DEFINE_integer("engine_fd", None, "For this command's own use.", flag_values=_FLAGS)
_ROLLOUT_FD = flags.DEFINE_integer("rollout_fd", None, "For this command's own use.", flag_values=_FLAGS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What is served: a model's folder (None: a random one), its name and its tokenizer."""

    config: Config
    name: str
    tokenizer: ChatTokenizer
    description: str


def resolve(config: Config) -> Config:
    """The configuration with what the flags say about model and backend."""
    config.model.checkpoint = _MODEL.value or config.model.checkpoint
    config.sampler.backend = _BACKEND.value or config.sampler.backend
    config.sampler.tokens_per_sequence = _STEP_TOKENS.value
    validate(config)
    if _COSERVE.value:
        validate_coserving(config)
        if not _WARM_UP.value:
            raise ValueError("--nowarm_up with --coserve: a program compiled in mid-run would miss objectives; leave it out")
    return config


def served_model(config: Config) -> Served:
    """Of the model that online clients get. Raises ValueError if the folder's tokenizer cannot be used."""
    policy = config
    if _COSERVE.value:
        config = serving_config(config)
    if config.model.checkpoint is not None:
        folder = Path(config.model.checkpoint)
        tokenizer = ChatTokenizer.load(folder)
        names = [part for part in folder.resolve().parts if part != "model"]
        name, what = names[-1], f"the model in {folder}"
    else:
        suite = load_task_suite(config.env.factory, config.env.options)
        tokenizer = ChatTokenizer.from_vocabulary(suite.vocabulary())
        name, what = "random", f"a random model (seed {config.seed}) with the words of {config.env.factory}"
    if _STORE.value and not _COSERVE.value:
        what = f"no weights yet, to be staged from {_STORE.value}; the tokenizer is that of {what}"
    sampler = config.sampler
    where = f"on {sampler.backend}, {sampler.max_slots} slots of {sampler.max_context_tokens} tokens"
    if _COSERVE.value:
        weights = f"weights staged from {_STORE.value}" if _STORE.value else policy.model.checkpoint or "random weights"
        where += f"; in its gaps rollouts of a policy with {weights}"
    return Served(config=config, name=_NAME.value or name, tokenizer=tokenizer, description=f"{what}, {where}")


def read_tokens() -> Tokens:
    tokens = Tokens(
        online=[read_secret(source) for source in _ONLINE.value],
        rollout=read_secret(_ROLLOUT.value) if _ROLLOUT.value else None,
        control=read_secret(_CONTROL.value) if _CONTROL.value else None,
    )
    tokens.check_address(_HOST.value)
    return tokens


def read_tls() -> ssl.SSLContext | None:
    if (_CERTIFICATE.value is None) != (_KEY.value is None):
        raise ValueError("--tls_certificate and --tls_key belong together; give both or neither")
    return server_tls(Path(_CERTIFICATE.value), Path(_KEY.value)) if _CERTIFICATE.value and _KEY.value else None


async def serve(served: Served, tokens: Tokens, tls: ssl.SSLContext | None, listener: socket.socket) -> str | None:
    """Start the engine, then take calls until told to stop. Returns what the engine said if it failed."""
    limits = Limits(
        max_body_bytes=_MAX_BODY.value,
        max_prompt_tokens=_MAX_PROMPT.value,
        max_completions_per_client=_MAX_PER_CLIENT.value,
    )
    async with EngineProcess(sys.argv[1:], two_models=_COSERVE.value) as process:
        engine = await process.connect()
        rollout_engine = await process.connect() if _COSERVE.value else None
        engine_run = asyncio.create_task(engine.run(process.explain))
        rollout_run = asyncio.create_task(rollout_engine.run(process.explain)) if rollout_engine is not None else None
        front = Front.make(
            engine,
            served.tokenizer,
            model_name=served.name,
            tokens=tokens,
            limits=limits,
            rollout_engine=rollout_engine,
        )
        server = FrontServer(front, listener, tls=tls)
        async with contextlib.AsyncExitStack() as stack:
            grpc_port = await start_grpc(front, stack) if _GRPC_PORT.value is not None else None
            url = address_of(listener, tls=tls is not None)
            report = {"url": url, "grpc_port": grpc_port, "model": served.name, "pid": os.getpid(), "engine_pid": process.pid}
            print(f"Ready at {url}" + (f", gRPC on port {grpc_port}" if grpc_port else ""), flush=True)
            if _READY_FILE.value:
                write_ready_file(Path(_READY_FILE.value), report)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, server.stop)
            outcome = await server.run(engine_run)
            if rollout_run is not None:
                rollout_run.cancel()
                await asyncio.gather(rollout_run, return_exceptions=True)
            return outcome


async def start_grpc(front: Front, stack: contextlib.AsyncExitStack) -> int:
    """JetStream's service beside HTTP, until `stack` is left. Returns its port."""
    from rose_jax.jetstream.grpc_service import GrpcServer

    certificate, key = (Path(path.value) if path.value else None for path in (_CERTIFICATE, _KEY))
    server = GrpcServer(front, host=_HOST.value, port=_GRPC_PORT.value or 0, certificate=certificate, key=key)
    await server.start()
    stack.push_async_callback(server.stop)
    return server.port


def write_ready_file(path: Path, report: Mapping[str, object]) -> None:
    """Whole or not at all: whoever waits for the file may read it as soon as it is there."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(report) + "\n")
    partial.rename(path)


def main() -> None:
    config = resolve(_CONFIG.value)
    if _ENGINE_FD.value is not None:
        assert _OWNER_PID.value is not None
        end_with_owner(_OWNER_PID.value)  # also while it compiles and does not look at its channel
        from scripts.serve_engine import StoreOptions, run_engine

        store = StoreOptions(address=_STORE.value, token=_STORE_TOKEN.value, ca=_STORE_CA.value)
        if _ROLLOUT_FD.value is not None:
            from scripts.serve_coserving import run_two_engines

            ends = {Side.SERVING: _ENGINE_FD.value, Side.ROLLOUT: _ROLLOUT_FD.value}
            run_two_engines(config, replica_id=_REPLICA_ID.value, ends=ends, store=store)
            return
        run_engine(config, replica_id=_REPLICA_ID.value, channel_fd=_ENGINE_FD.value, store=store, warm_up=_WARM_UP.value)
        return
    if _OWNER_PID.value is not None:
        end_with_owner(_OWNER_PID.value)
    served, tokens, tls = served_model(config), read_tokens(), read_tls()
    allow_many_connections()
    with listen(_HOST.value, _PORT.value) as listener:
        print(f"Serving {served.name!r}: {served.description}", flush=True)
        failure = asyncio.run(serve(served, tokens, tls, listener))
    if failure is not None:
        print(f"serve: {failure}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main, required=["config"])
