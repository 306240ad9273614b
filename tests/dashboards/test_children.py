from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dashboards.observe.prometheus import ObserveError, end
from tests.tooling.scripts import ROOT

PROGRAM = """
import os, signal, sys
from pathlib import Path
from dashboards.observe import __main__ as observe
from dashboards.pictures import __main__ as pictures, boards

def with_child(*args, **options):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    with boards._vllm_engines(1):
        print("started", flush=True)
        os.read(reader, 1)

name, program = sys.argv[1:]
boards._VLLM = Path(program)
pictures.take_vllm_boards = observe.observe = with_child
pictures.shutil.which = lambda name: name
del sys.argv[1:]
sys.exit({"observe": observe, "pictures": pictures}[name].main())
"""
"""Runs the main function of `make screenshot` or of `make observe`, with a child instead of the two vLLM engines.

The signal ends the read even if it comes before the read begins; `signal.pause()` would then wait for a second signal.
"""


def child(before: str) -> subprocess.Popen[str]:
    program = f"import signal; {before}; print('ready', flush=True); signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_child_is_ended_by_sigterm() -> None:
    process = child("pass")
    end(process)
    assert process.returncode == -signal.SIGTERM


def test_a_child_that_sigterm_does_not_end_is_killed_and_reported() -> None:
    process = child("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with pytest.raises(ObserveError, match=r"SIGTERM did not end process \d+ in 0.1 s"):
        end(process, timeout_s=0.1)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("name", ["observe", "pictures"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_program_and_its_servers(name: str, number: signal.Signals, tmp_path: Path) -> None:
    server, ended = tmp_path / "server", tmp_path / "ended"
    server.write_text(f"#!/bin/sh\ntrap 'echo > {ended}; exit' TERM\necho '[]'\nread line\n")
    server.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM, name, str(server)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
    assert ended.exists()
    assert process.returncode == 128 + number
