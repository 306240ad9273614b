"""Tests a stock vLLM that is refused host memory, because its process's address space is limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine_rig import MARKS
from tests.vllm.short_of_memory import GRANTED, PIECE_SLOTS, PIECES

pytestmark = MARKS


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("short")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.short_of_memory", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        # Otherwise each thread reserves 64 MiB of address space.
        env={**os.environ, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout, json.loads((folder / "told.json").read_text())


@pytest.mark.parametrize("granted", GRANTED)
def test_an_engine_runs_with_less_host_memory_than_requested(
    granted: int, ended: tuple[str, list[dict[str, Any]]]
) -> None:
    """The engine gets none or one of the four chunks that it requests."""
    log, engines = ended
    reported = engines[GRANTED.index(granted)]
    assert reported["capacity"] == reported["gauge"] == granted * PIECE_SLOTS
    for run in ("first", "again"):
        assert [one["tokens"] for one in reported[run]] == [one["tokens"] for one in reported["truth"]]
    from_host = [one["cached"] for one in reported["again"]]
    assert all(from_host) if granted else not any(from_host)
    assert (reported["loaded"] > 0) is (granted > 0)
    assert (reported["host_full"] > 0) is (granted == 0)
    assert reported["degraded"] is None
    (line,) = (
        line
        for line in log.splitlines()
        if f"host_memory_refused ready_slots={granted * PIECE_SLOTS} " in line
    )
    # Without any slot nothing is offloaded, which is an error.
    assert ("WARNING" if granted else "ERROR") in line
    assert f"wanted_slots={PIECES * PIECE_SLOTS} " in line
    assert "Cannot allocate memory" in line
