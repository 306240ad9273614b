from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from dashboards.observe.prometheus import ObserveError, end


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
