"""Tokens, keys and TLS contexts: read from files or the environment, never from a flag's value, never shown.

A secret is named by where it is: `file:/path` or `env:NAME`. Its repr hides it, so that a config or an exception that is logged
shows only where it came from.
"""

from __future__ import annotations

import dataclasses
import hmac
import os
import ssl
import stat
from pathlib import Path

MIN_SECRET_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Secret:
    """The bytes of a token or key, and where they came from."""

    value: bytes = dataclasses.field(repr=False)
    source: str

    def matches(self, offered: str) -> bool:
        """Whether `offered` is this secret, in time that does not depend on where they differ."""
        return hmac.compare_digest(offered.encode("utf-8", "surrogateescape"), self.value)


def read_secret(source: str) -> Secret:
    """The secret named by `file:/path` or `env:NAME`, without surrounding white space.

    Raises:
        ValueError: another form, a missing, short or non-ASCII secret, or a file that others may read.
    """
    scheme, _, where = source.partition(":")
    if scheme == "file":
        path = Path(where)
        if not path.is_file():
            raise ValueError(f"{source}: there is no such file")
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise ValueError(f"{source}: others may read it (mode {stat.S_IMODE(path.stat().st_mode):o}); chmod 600 it")
        value = path.read_bytes().strip()
    elif scheme == "env":
        if where not in os.environ:
            raise ValueError(f"{source}: the environment has no such variable")
        value = os.environb[where.encode()].strip()
    else:
        raise ValueError("a secret is named as file:/path or env:NAME; its value is not given here")
    if len(value) < MIN_SECRET_BYTES or not value.isascii() or len(value.split()) != 1:
        raise ValueError(f"{source}: give one word of at least {MIN_SECRET_BYTES} ASCII characters, e.g. `openssl rand -hex 32`")
    return Secret(value, source)


def server_tls(certificate: Path, private_key: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    """TLS for a server; with `client_ca` only clients with a certificate of that authority are let in (mTLS).

    Raises:
        ValueError: a file is missing, or certificate and key cannot be used together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, certificate, private_key)
    if client_ca is not None:
        _trust(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(server_ca: Path, *, certificate: Path | None = None, private_key: Path | None = None) -> ssl.SSLContext:
    """TLS for a client that trusts the authority `server_ca` only; with a certificate of its own for mTLS.

    Raises:
        ValueError: as server_tls.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _trust(context, server_ca)
    if certificate is not None:
        _load_pair(context, certificate, private_key)
    return context


def _load_pair(context: ssl.SSLContext, certificate: Path, private_key: Path | None) -> None:
    for path in filter(None, (certificate, private_key)):
        _check_file(path)
    try:
        context.load_cert_chain(certificate, private_key, password="")  # an encrypted key fails instead of asking a terminal
    except OSError as error:
        pair = f"certificate {certificate} and private key {private_key or certificate}"
        raise ValueError(
            f"{pair} cannot be used: {_reason(error)}; give PEM files that belong together, the key not encrypted"
        ) from error


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    _check_file(authority)
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ValueError(f"{authority} is no certificate authority: {_reason(error)}; give a PEM file of certificates") from error


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
