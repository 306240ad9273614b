"""`.ci/tools` with stand-ins for the package manager."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.tooling.scripts import ROOT

LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"
APT_GET = """#!/bin/bash
echo "$*" >> {calls}
if [[ $* == update ]] && (($(grep -c update {calls}) <= {failures})); then
    echo "{message}" >&2
    exit 100
fi
"""


def install(folder: Path, *, failures: int = 0, message: str = LOCKED) -> subprocess.CompletedProcess[str]:
    """Run the script where no package is installed, and `apt-get update` fails this many times."""
    programs = folder / "bin"
    programs.mkdir()
    script = APT_GET.format(calls=folder / "calls", failures=failures, message=message)
    for name, text in {"apt-get": script, "dpkg-query": "#!/bin/sh", "id": "#!/bin/sh\necho 0"}.items():
        (programs / name).write_text(f"{text}\n")
        (programs / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "KVOFFLOAD_TOOLS_PAUSE_S": "0",
    }
    command = [ROOT / ".ci" / "tools"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("failures", [0, 2])
def test_tools_are_installed_once_another_run_has_released_the_lock(tmp_path: Path, failures: int) -> None:
    done = install(tmp_path, failures=failures)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == 0, done.stderr
    assert calls[:-1] == ["update"] * (failures + 1)
    assert "DPkg::Lock::Timeout=300 install -y" in calls[-1]


def test_another_error_ends_at_once_and_names_what_is_missing(tmp_path: Path) -> None:
    done = install(tmp_path, failures=9, message="E: no network")
    assert (tmp_path / "calls").read_text().splitlines() == ["update"]
    assert done.returncode == 1
    assert "no network" in done.stderr
    assert "Install with your distribution's tools: gcc" in done.stderr
