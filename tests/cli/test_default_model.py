from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(900)]


def test_returning_turns_are_reused_and_outputs_are_equal() -> None:
    found = _run("demo", "--conversations", "4", "--turns", "3")
    assert found["passed"]
    assert found["kv_blocks"] / found["device_blocks"] >= 2
    assert found["with_offloading"]["reused_share"] >= 0.9


def test_returning_turns_after_a_kill_are_fetched_from_the_disk(tmp_path: Path) -> None:
    found = _run("demo", "--disk", str(tmp_path), "--restart", "--conversations", "3", "--turns", "3")
    assert found["passed"]
    assert found["tiers"]["disk"]["read_blocks"] > 0


def _run(*options: str) -> dict:
    command = [sys.executable, "-m", "kvoffload", *options, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    found: dict = json.loads(ended.stdout)
    return found
