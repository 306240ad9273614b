"""Runs the commands of the README in an environment that has only Python and pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tooling.pages import blocks
from tests.tooling.scripts import ROOT

# Blocks that call `make` are left out, because `make` creates its own environment.
# tests/tooling/test_readme.py checks them.
BLOCKS = [
    block.text
    for block in blocks(ROOT / "README.md")
    if not block.needs and not block.text.startswith("make ")
]
CHECKOUT = ("kvoffload", "plugins", "dashboards", "pyproject.toml", "README.md", "LICENSE")


def test_the_readme_has_blocks_to_run() -> None:
    here = "".join(BLOCKS)
    for command in (
        "pip install .",
        "kvoffload demo",
        "kvoffload doctor",
        "kvoffload dashboards export",
    ):
        assert command in here


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_run_as_written(tmp_path: Path) -> None:
    folder, bare = tmp_path / "checkout", tmp_path / "bare"
    folder.mkdir()
    for name in CHECKOUT:
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, folder / name)
    subprocess.run([sys.executable, "-m", "venv", bare], check=True)
    for block in BLOCKS:
        run(block, folder, bare)
    assert list((folder / "kvoffload-dashboards").rglob("*.prometheusrule.yaml"))
    # Reinstall this checkout. Without --force-reinstall, pip keeps the installed version, which has the same
    # number.
    run(
        "pip install --quiet --force-reinstall --no-deps .\nkvoffload --version\npython -m kvoffload --version",
        folder,
        bare,
    )


def run(block: str, folder: Path, bare: Path) -> None:
    """Run a block of shell commands. Only the bare environment is on the path."""
    # Pin the lock's versions and its build of torch. Without them pip may choose a larger build.
    ours = {
        "PATH": f"{bare / 'bin'}:/usr/bin:/bin",
        "PIP_CONSTRAINT": str(ROOT / ".ci" / "requirements.lock"),
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=folder,
        env={**kept, **ours},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
