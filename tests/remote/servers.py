"""Real stores for the time of a test, from their wheels, on ports of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
_NODE = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 2**24, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
threading.Event().wait()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """A process that is killed at the end, also where it is stopped."""

    def __init__(self, *command: object, log: Path, env: Mapping[str, str] | None = None) -> None:
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [str(part) for part in command], stdout=file, stderr=file, env={**os.environ, **(env or {})}
            )

    def stop(self) -> None:
        """Let it run no more, as a machine that hangs."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def wait_for_port(port: int, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on {port}")


class Mooncake:
    """A master and one store node.

    Attributes:
        url: for `remote_url`.
    """

    def __init__(self, folder: Path, node_bytes: int = 2**28) -> None:
        if find_library("ibverbs") is None:
            pytest.skip("libibverbs1 is not installed: make tools")
        self._folder, self._node_bytes = folder, node_bytes
        self.port = free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self.start_master()
        self.start_node()

    def start_master(self) -> None:
        ports = "--rpc_port", self.port, "--metrics_port", free_port()
        hosts = "--rpc_address", "127.0.0.1", "--metrics_host", "127.0.0.1"
        self.master = Server(BIN / "mooncake_master", *ports, *hosts, log=self._folder / "master.log")
        wait_for_port(self.port)

    def start_node(self) -> None:
        log = self._folder / "node.log"
        log.write_bytes(b"")
        self.node = Server(sys.executable, "-c", _NODE, f"127.0.0.1:{self.port}", self._node_bytes, log=log)
        until = time.monotonic() + 20
        while b"ready" not in log.read_bytes():
            assert time.monotonic() < until, "the store node does not start"
            time.sleep(0.02)

    def kill(self) -> None:
        self.node.kill()
        self.master.kill()


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "kvoffloadtests", "AWS_SECRET_ACCESS_KEY": "notasecretatall"}


class Bucket:
    """SeaweedFS with one bucket.

    Attributes:
        url: for `remote_url`.
        environment: what reaches it.
    """

    def __init__(self, folder: Path) -> None:
        ports = {name: free_port() for name in ("s3", "master", "volume", "filer", "admin")}
        grpc = {f"{name}.port.grpc": free_port() for name in ("s3", "master", "volume", "filer", "admin")}
        options = [f"-{name}.port={port}" for name, port in ports.items()]
        options += [f"-{name}={port}" for name, port in grpc.items()]
        options += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-bucket=blocks",
        ]
        options += [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        self.url = "s3://blocks/of/tests"
        self.environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT": f"http://127.0.0.1:{ports['s3']}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        self.server = Server(BIN / "weed", "mini", *options, log=folder / "weed.log", env=CREDENTIALS)
        self.port = ports["s3"]
        wait_for_port(self.port)

    def kill(self) -> None:
        self.server.kill()
