"""What the default model must show, on fewer conversations than the defaults, which take minutes.

Returning turns come several times sooner; how much sooner is for the benchmarks to say.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_reuse_time_and_equality() -> None:
    found = _run("demo", "--conversations", "4", "--turns", "3", "--concurrency", "1")
    assert found["passed"]
    assert found["workload"]["kv_to_cache"] >= 3
    assert found["with_offloading"]["returning_reused_share"] >= 0.9
    assert found["returning_ttft_ratio"] > 1


def test_returning_turns_after_a_kill_come_sooner_with_the_disk(tmp_path: Path) -> None:
    found = _run("demo", "--disk", str(tmp_path), "--restart", "--conversations", "3", "--turns", "3")
    assert found["passed"]
    assert found["after"]["fetched"] > 0
    assert found["sooner"] > 1


def _run(*options: str) -> dict:
    """In a process of its own, with all cores: what is timed here must not share an interpreter with a test."""
    command = [sys.executable, "-m", "kvoffload.cli", *options, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    found: dict = json.loads(ended.stdout)
    return found
