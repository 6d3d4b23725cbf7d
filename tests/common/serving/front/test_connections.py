"""What a connection is made of: TLS, where it is asked for, and no waiting of tokens for the network's acknowledgements."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import openai
import pytest

from common.transfer.secrets import client_tls, server_tls
from tests.common.serving.front.running import MODEL, RunningFront, running_front


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with self-signed certificates for this machine: server.pem and other.pem, each with its .key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "other"):
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -addext subjectAltName=IP:127.0.0.1"
        files = ["-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem"]
        subprocess.run([*make.split(), "-subj", f"/CN={name}", *files], check=True, capture_output=True)
    return folder


def client_of(front: RunningFront, tls: ssl.SSLContext | bool) -> openai.OpenAI:
    http_client = openai.DefaultHttpxClient(verify=tls)
    return openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http_client)


def test_over_tls_a_client_that_trusts_the_certificate_is_served_and_every_other_refuses_it(certificates: Path) -> None:
    with running_front(tls=server_tls(certificates / "server.pem", certificates / "server.key")) as front:
        assert front.url.startswith("https://")
        with client_of(front, client_tls(certificates / "server.pem")) as client:
            whole = client.completions.create(model=MODEL, prompt="go", max_tokens=8, temperature=0)
            events = client.completions.create(model=MODEL, prompt="go", max_tokens=8, temperature=0, stream=True)
            assert "".join(event.choices[0].text for event in events) == whole.choices[0].text
        for stranger in (client_tls(certificates / "other.pem"), True):
            with client_of(front, stranger) as client, pytest.raises(openai.APIConnectionError) as refused:
                client.models.list()
            assert "CERTIFICATE_VERIFY_FAILED" in str(refused.value.__cause__)
        with pytest.raises((http.client.HTTPException, OSError)):  # no answer without TLS
            urllib.request.urlopen(f"http://127.0.0.1:{front.port}/health", timeout=60)
        with client_of(front, client_tls(certificates / "server.pem")) as client:
            assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("server.pem", "missing.key", "missing.key: there is no such file"),
        ("missing.pem", "server.key", "missing.pem: there is no such file"),
        ("server.pem", "other.key", "other.key cannot be used: KEY_VALUES_MISMATCH"),
        ("server.pem", "encrypted.key", "encrypted.key cannot be used"),
        ("server.key", "server.key", "server.key cannot be used"),
        ("server.pem", "empty.key", "empty.key cannot be used"),
    ],
)
def test_a_certificate_or_key_that_cannot_be_used_is_named_in_one_line(
    certificates: Path, certificate: str, key: str, words: str
) -> None:
    (certificates / "empty.key").touch()
    encrypt = ["openssl", "pkey", "-in", certificates / "server.key", "-aes256", "-passout", "pass:secret"]
    subprocess.run([*encrypt, "-out", certificates / "encrypted.key"], check=True, capture_output=True)
    with pytest.raises(ValueError, match=words) as refused:
        server_tls(certificates / certificate, certificates / key)
    assert "\n" not in str(refused.value)


def test_an_authority_that_cannot_be_read_is_named(certificates: Path) -> None:
    with pytest.raises(ValueError, match=r"missing\.pem: there is no such file"):
        client_tls(certificates / "missing.pem")
    with pytest.raises(ValueError, match=r"server\.key is no certificate authority"):
        client_tls(certificates / "server.key")


def test_small_pieces_leave_at_once(server: RunningFront) -> None:
    """With Nagle's algorithm a token waits until the last one is acknowledged, which clients put off for 40 ms."""
    with contextlib.closing(server.http()) as connection:
        connection.request("GET", "/health")
        connection.getresponse().read()
        (protocol,) = server.server._server.server_state.connections
        assert protocol.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
