"""Where the workers of an engine find the store, in a form that crosses processes: no secret travels with it, only where it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from common.transfer.secrets import client_tls, read_secret
from common.transfer.store.directory import DirectoryStore
from common.transfer.store.http_client import HttpStore
from common.transfer.store.protocol import Store


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """Where every rank finds the store: a URL or a folder. Secrets are named by where they are (see common.transfer.secrets)."""

    where: str
    token: str | None = None
    ca_file: str | None = None
    key: str | None = None
    timeout_s: float = 60.0

    def open(self) -> Store:
        if not self.where.startswith(("http://", "https://")):
            return DirectoryStore(self.where)
        tls = None if self.ca_file is None else client_tls(Path(self.ca_file))
        token = None if self.token is None else read_secret(self.token)
        return HttpStore(self.where, token=token, tls=tls, timeout_s=self.timeout_s)
