"""The replica processes of a training run: the command of each, where they take weights from, and the secrets they share with it.

What they leave behind lies in the workdir: logs/NAME.log, logs/fleet.log with what happened to them, and replicas/ with tokens and
addresses, which nobody else may read. Replicas get weights from the learner's own store over HTTP, each version as its differences.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from common.config import Config, FleetConfig, ReplicaConfig
from common.rollout.fleet import ReplicaFleet
from common.serving.remote import RemoteAddress, RemoteReplica, TimeLimits
from common.serving.remote_process import AttachedReplica, Origin, ProcessFiles, ReplicaProcess
from common.transfer.secrets import client_tls, read_secret, server_tls
from common.transfer.store.http_server import StoreServer
from common.transfer.store.protocol import Store
from scripts import entry

LOGS, PRIVATE = "logs", "replicas"


class FleetNews:
    """Tells what happens to replicas: on stderr, beside the progress bars, and in logs/fleet.log."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "fleet.log"

    def __call__(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        tqdm.write(text, file=sys.stderr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shared:
    """What all replicas are told: the learner's store, and by kind where the secrets are (file:/path or env:NAME)."""

    store_url: str
    store: str
    rollout: str
    control: str


def open_fleet(config: Config, workdir: Path, store: Store, stack: contextlib.ExitStack) -> ReplicaFleet:
    """The fleet of `config.fleet`, not yet entered; `store` is served to it until `stack` is closed.

    Raises:
        ValueError: an address, token or certificate cannot be used.
    """
    fleet, folder = config.fleet, workdir.resolve()
    private = folder / PRIVATE
    private.mkdir(mode=0o700, exist_ok=True)
    store_token = _own_secret(private / "store_token") if fleet.store_token is None else fleet.store_token
    tls = server_tls(Path(fleet.store_certificate), Path(str(fleet.store_key))) if fleet.store_certificate else None
    try:
        server = StoreServer(store, host=fleet.store_host, port=fleet.store_port, token=read_secret(store_token), tls=tls)
    except OSError as error:
        place = f"fleet.store_host={fleet.store_host!r}, store_port={fleet.store_port}"
        raise ValueError(f"{place} cannot be listened on: {error.strerror}; name another") from error
    stack.callback(server.close)
    own = {kind: _own_secret(private / f"{kind}_token") for kind in ("rollout", "control")}
    shared = _Shared(store_url=server.url, store=store_token, **own)
    origins = [_origin(config, replica, folder, shared) for replica in fleet.replicas]
    return ReplicaFleet(origins, max_restarts=fleet.max_restarts, on_news=FleetNews(folder / LOGS))


def _origin(config: Config, replica: ReplicaConfig, folder: Path, shared: _Shared) -> Origin:
    fleet = config.fleet
    if replica.address is not None:
        shared = dataclasses.replace(shared, rollout=str(fleet.rollout_token), control=str(fleet.control_token))
        connect = _connector(replica.name, fleet, shared)
        return AttachedReplica(replica.name, replica.address, connect, return_timeout_s=fleet.start_timeout_s)
    ready = folder / PRIVATE / f"{replica.name}.json"
    command = [
        *(sys.executable, "-m", "scripts.serve", *entry.config_arguments()),
        *(f"--backend={replica.backend}", f"--config.sampler.tensor_parallel={replica.tensor_parallel}"),
        *(f"--replica_id={replica.name}", "--port=0", f"--ready_file={ready}"),
        f"--tokens_per_step={config.sampler.tokens_per_sequence}",
        "--coserve" if replica.coserve else "--nowarm_up",  # a dedicated one compiles programs as turns need them
        *(f"--store={shared.store_url}", f"--store_token={shared.store}"),
        *((f"--store_ca={fleet.ca}",) if fleet.store_certificate and fleet.ca else ()),
        *(f"--rollout_token={shared.rollout}", f"--control_token={shared.control}"),
    ]
    return ReplicaProcess(
        replica.name,
        command,
        ProcessFiles(log=folder / LOGS / f"{replica.name}.log", ready=ready),
        _connector(replica.name, fleet, shared),
        environment=_environment(replica, folder),
        start_timeout_s=fleet.start_timeout_s,
    )


def _connector(name: str, fleet: FleetConfig, shared: _Shared) -> Callable[[str], RemoteReplica]:
    rollout, control = read_secret(shared.rollout), read_secret(shared.control)
    limits = TimeLimits(generate_s=fleet.generate_timeout_s, sync_s=fleet.sync_timeout_s)
    tls = client_tls(Path(fleet.ca)) if fleet.ca else None

    def connect(url: str) -> RemoteReplica:
        address = RemoteAddress(url=url, rollout_token=rollout, control_token=control, tls=tls)
        return RemoteReplica(name, address, limits=limits, store=shared.store_url)

    return connect


def _environment(replica: ReplicaConfig, folder: Path) -> dict[str, str]:
    """Ours, the config's, and a place for compiled programs, by which a replica that is started again is soon back."""
    search = os.pathsep.join([str(entry.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(folder / PRIVATE / "compiled"))
    own = {"PYTHONPATH": search, "PYTHONSAFEPATH": "1", "JAX_COMPILATION_CACHE_DIR": compiled}
    return own | {name: str(value) for name, value in replica.environment.items()}


def _own_secret(path: Path) -> str:
    """The name of a new secret that only this run and its processes know."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return f"file:{path}"
