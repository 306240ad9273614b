"""What the defaults must show, on this machine, at full size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_reuse_time_and_equality_with_the_defaults() -> None:
    found = _run()
    assert found["passed"]
    assert found["workload"]["kv_to_cache"] >= 3
    assert found["with_offloading"]["returning_reused_share"] >= 0.9
    assert found["returning_ttft_ratio"] >= 3


def test_offloading_costs_nothing_where_nothing_repeats() -> None:
    found = _run("--no-reuse", "20", "--first-tokens", "1024")
    assert len(found["pairs"]) == 20
    assert found["broken_laws"] == []
    assert found["passed"], f"{found['ratio']:.4f}, {found['low']:.4f} to {found['high']:.4f}"


def _run(*options: str) -> dict:
    """In a process of its own, with all cores: what is timed here must not share an interpreter with a test."""
    command = [sys.executable, "-m", "kvoffload.cli", "demo", "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stdout, ended.stderr
    found: dict = json.loads(ended.stdout)
    return found
