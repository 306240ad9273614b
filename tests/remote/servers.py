"""Starts real servers of remote tiers. A test is skipped if a program that its server needs is missing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from ctypes.util import find_library
from http.client import HTTPConnection
from pathlib import Path

import pytest

from kvoffload.remote.local import LocalBucket, LocalMooncake, Server, free_port


class Mooncake(LocalMooncake):
    """Mooncake with one store node, and a master with these options."""

    def __init__(self, folder: Path, *options: object, node_bytes: int = 2**28) -> None:
        if find_library("ibverbs") is None:
            pytest.skip("needs ibverbs: make tools")  # as for the mark `tools`
        super().__init__(folder, node_bytes, options)


class Reached:
    """An S3 server with one bucket. Clients find it by environment variables."""

    environment: Mapping[str, str]

    @property
    def secrets(self) -> tuple[str, ...]:
        """Return texts that must not appear in messages."""
        return tuple(self.environment[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))

    def reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Set the environment variables by which clients in this process find this server."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)


class Bucket(LocalBucket, Reached):
    """SeaweedFS with one bucket."""


class Moto(Reached):
    """moto, which imitates S3 in Python, with one bucket.

    Attributes:
        url: the value for `remote_url`.
        environment: the environment variables that clients need.
    """

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("moto", reason="needs moto: make venv")
        port, log = free_port(), folder / "moto.log"
        command = sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port
        self._server = Server(*command, log=log, is_ready=lambda: "Running on" in log.read_text())
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("PUT", "/blocks")
        assert connection.getresponse().status == 200
        connection.close()
        self.url = "s3://blocks/kvoffload"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "key-of-moto",
            "AWS_SECRET_ACCESS_KEY": "secret-of-moto",
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }

    def close(self) -> None:
        self._server.kill()


class SecureBucket(Bucket):
    """A bucket with TLS and a self-signed certificate.

    Attributes:
        certificate: the path of the certificate.
    """

    def __init__(self, folder: Path) -> None:
        self.certificate, key, port = folder / "certificate.pem", folder / "key.pem", free_port()
        extensions = "subjectAltName=IP:127.0.0.1", "basicConstraints=critical,CA:FALSE"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=kvoffload tests"]
        command += ["-keyout", str(key), "-out", str(self.certificate)]
        command += [part for extension in extensions for part in ("-addext", extension)]
        subprocess.run(command, check=True, capture_output=True)
        files = f"-s3.cert.file={self.certificate}", f"-s3.key.file={key}"
        super().__init__(folder, (*files, f"-s3.port.https={port}"))
        secure = {"AWS_ENDPOINT": f"https://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "false"}
        self.environment = {**self.environment, **secure}


def suspend(server: Server) -> None:
    """Suspend the server's process, as if its machine hung."""
    server.process.send_signal(signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)


def resume(server: Server) -> None:
    server.process.send_signal(signal.SIGCONT)
