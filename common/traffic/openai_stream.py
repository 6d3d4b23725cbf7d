"""A streaming client of OpenAI's /v1/completions that does as little as possible between a byte's arrival and its timestamp.

One connection a request, standard library only: a load generator shares its core with nothing it can avoid. Every server-sent event
with a choice counts as one token, up to the number asked for; a server that sends several at once shows as longer gaps. What an
answer that is no event stream says becomes the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Callable
from typing import Any

from common.errors import RoseError

MAX_LINE_BYTES = 1 << 20
MAX_ERROR_BYTES = 1 << 16


class ServerError(RoseError):
    """A server that refused or failed a request; the text is its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A server: http(s)://HOST:PORT[/PREFIX], the model it serves, and its API key if it wants one."""

    url: str
    model: str
    api_key: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Address:
    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> _Address:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"{url!r} is no address of a server; write http://HOST:PORT")
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host=parts.hostname, port=parts.port or (443 if tls else 80), tls=tls, prefix=prefix)


async def served_model(url: str, api_key: str | None = None) -> str:
    """The first model that /v1/models names."""
    body = await get(url, "/v1/models", api_key)
    names = [entry["id"] for entry in json.loads(body)["data"]]
    if not names:
        raise ServerError(f"{url} serves no model")
    return names[0]


async def get(url: str, path: str, api_key: str | None = None) -> bytes:
    """The body of a GET. Raises ServerError for any status but 200, OSError if nobody answers."""
    async with _exchange(_Address.of(url), "GET", path, None, api_key) as (status, chunks):
        body = b"".join([chunk async for chunk in chunks])
    if status != 200:
        raise ServerError(f"GET {url}{path}: status {status}: {body[:MAX_ERROR_BYTES].decode(errors='replace')}")
    return body


async def stream_completion(
    target: Target, prompt_token_ids: list[int], num_tokens: int, on_token: Callable[[], None], *, seed: int
) -> int:
    """Generate exactly `num_tokens`, calling `on_token` as each arrives. Returns the number the server says it generated.

    Raises:
        ServerError: it refused or failed the request; OSError if the connection broke.
    """
    body = {
        "model": target.model,
        "prompt": prompt_token_ids,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    num_generated = num_events = 0
    async with _exchange(_Address.of(target.url), "POST", "/v1/completions", body, target.api_key) as (status, chunks):
        if status != 200:
            text = b"".join([chunk async for chunk in chunks])[:MAX_ERROR_BYTES].decode(errors="replace")
            raise ServerError(f"status {status}: {text}")
        async for data in _events(chunks):
            if data == b"[DONE]":
                break
            event: dict[str, Any] = json.loads(data)
            if "error" in event:
                raise ServerError(str(event["error"].get("message", event["error"])))
            if event.get("choices") and num_events < num_tokens:  # some servers end with an empty event of its own
                on_token()
                num_events += 1
            usage = event.get("usage")
            if usage:
                num_generated = usage["completion_tokens"]
    return num_generated or num_events


async def _events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


@contextlib.asynccontextmanager
async def _exchange(
    address: _Address, method: str, path: str, body: dict[str, Any] | None, api_key: str | None
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Send a request on a connection of its own; yields the status and the body's pieces as they come."""
    tls = ssl.create_default_context() if address.tls else None
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls, limit=MAX_LINE_BYTES)
    try:
        payload = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{method} {address.prefix}{path} HTTP/1.1",
            f"Host: {address.host}:{address.port}",
            "Connection: close",
            "Content-Type: application/json",
            f"Content-Length: {len(payload)}",
        ]
        if api_key is not None:
            lines.append(f"Authorization: Bearer {api_key}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + payload)
        await writer.drain()
        status_line = await reader.readline()
        parts = status_line.split()
        if len(parts) < 2 or not parts[1].isdigit():
            raise ServerError(f"{address.host}:{address.port} does not answer in HTTP: {status_line[:80]!r}")
        headers: dict[bytes, bytes] = {}
        while (line := await reader.readline()) not in (b"\r\n", b"\n", b""):
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        yield int(parts[1]), _body(reader, headers)
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while True:
            line = await reader.readline()
            if not line.strip():
                raise asyncio.IncompleteReadError(line, None)  # the server went away in the middle
            size = int(line.split(b";")[0], 16)
            if size == 0:
                return
            yield await reader.readexactly(size)
            await reader.readline()
    elif b"content-length" in headers:
        yield await reader.readexactly(int(headers[b"content-length"]))
    else:
        while chunk := await reader.read(1 << 16):
            yield chunk
