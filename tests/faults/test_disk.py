"""Tests an engine in a separate process whose disk calls fail. Every token must be right, and no request may
hang.

The process preloads `failing_disk.c`, which reads from a file how disk calls must fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disk_engine import HEAD_DIM, LONG_HEAD_DIM
from tests.tooling.scripts import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ALL = range(4)


class Process:
    """A process that runs engines. The test decides how the process's disk calls fail."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.root, self._orders, self._log = folder / "disks", folder / "orders", folder / "log"
        self.root.mkdir()
        self.order()
        environment = {
            **os.environ,
            "LD_PRELOAD": str(library),
            "FAILING_DISK": str(self.root),
            "FAILING_DISK_ORDERS": str(self._orders),
            "KVOFFLOAD_LOGGING_LEVEL": "INFO",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.disk_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
            )

    def order(self, *orders: str) -> None:
        """Set how disk calls fail from now on. Without arguments, they succeed."""
        beside = self._orders.with_suffix(".new")
        beside.write_text("".join(f"{order}\n" for order in orders))
        beside.rename(self._orders)

    def __call__(self, name: str, *arguments: object, **settings: object) -> dict[str, Any]:
        """Run a command in the process; return its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments, settings]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process is dead:\n{self.log[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def harmed(self) -> int:
        """The number of disk calls with an injected fault."""
        done = self._orders.with_suffix(".done")
        return done.stat().st_size if done.exists() else 0

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """Start one process for all tests of this file. Each test starts its own engine in it."""
    folder = tmp_path_factory.mktemp("failing-disk")
    library = folder / "failing_disk.so"
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library)]
    subprocess.run(["gcc", *flags, str(ROOT / "tests/faults/failing_disk.c"), "-ldl"], check=True)
    process = Process(folder, library)
    yield process
    process.end()


@pytest.fixture(params=[HEAD_DIM, LONG_HEAD_DIM], ids=["short pages", "long pages"])
def head_dim(request: pytest.FixtureRequest) -> int:
    """Return the model's head size. Only blocks of the smaller size are copied through a buffer."""
    return int(request.param)


@pytest.fixture
def folder(process: Process, request: pytest.FixtureRequest) -> Path:
    return process.root / request.node.name


@pytest.fixture
def engine(process: Process, folder: Path, head_dim: int) -> Iterator[Process]:
    """Start an engine that finds its prompts only on the disk, where an earlier engine wrote them."""
    process("start", str(folder), head_dim=head_dim)
    process("serve", *ALL, *ALL)
    process("close")
    state = process("start", str(folder), timeout_s=1.0, head_dim=head_dim)
    assert state["blocks"] > 0
    yield process
    process.order()
    process("close")


def fetched(state: dict[str, Any], outcome: str = "done") -> int:
    return int(state["copies"].get(f"load {outcome}", 0))


def spilled(state: dict[str, Any], outcome: str = "done") -> int:
    return int(state["copies"].get(f"store {outcome}", 0))


@pytest.mark.parametrize(
    ("fault", "outcome"), [("short", "done"), ("error", "failed"), ("flip", "corrupt")], ids=lambda word: word
)
def test_short_calls_are_completed_and_failing_or_wrong_reads_only_cost_hits(
    engine: Process, fault: str, outcome: str
) -> None:
    engine.order(f"{fault} 1")
    before = engine.harmed
    state = engine("serve", *ALL, *ALL)
    assert {one for one in ("done", "failed", "corrupt") if fetched(state, one)} == {outcome}
    assert state["is_usable"] or fault == "error"
    assert "disk_call_failed" in engine.log or fault != "error"
    assert engine.harmed > before


def test_a_torn_write_is_found_when_it_is_read(process: Process) -> None:
    folder = str(process.root / "torn")
    process.order()
    process("start", folder)
    process.order("torn 1")
    process("serve", *ALL)
    state = process("serve", *ALL)
    assert spilled(state) > 0  # the failing disk reports success, so the blocks count as written
    process("close")
    process.order()
    process("start", folder)
    state = process("serve", *ALL)
    # The first half of a torn write is intact, so some blocks are complete.
    assert fetched(state, "corrupt") > fetched(state)
    process("close")


def test_a_full_disk_closes_only_the_tier(process: Process) -> None:
    process.order()
    process("start", str(process.root / "full"))
    process("serve", *ALL)
    process.order("full 1")
    state = process("serve", *ALL, *ALL)
    assert spilled(state, "failed") > 0
    assert not state["is_usable"]
    assert "No space left" in process.log
    process.order()
    process("serve", *ALL)
    process("close")


def test_an_engine_starts_without_the_tier_if_the_disk_is_too_small(process: Process) -> None:
    process.order("full 1")
    assert not process("start", str(process.root / "too small"), opens_in_s=1.0)["is_usable"]
    process("serve", *ALL, *ALL)
    process("close")
    process.order()
    assert "has no room for" in process.log


def test_a_hanging_read_opens_the_breaker_and_closing_does_not_wait(engine: Process, head_dim: int) -> None:
    engine.order("hang 1")
    state = engine("serve", *ALL)  # only the first request waits for the timeout
    assert fetched(state, "failed") > 0
    assert bool(state["abandoned"]) == (head_dim == LONG_HEAD_DIM), "host slots under the call, and no others"
    assert not state["is_usable"]
    assert state["fetching"] == 0
    assert "disk_call_hangs" in engine.log
    before = engine.harmed
    engine("serve", *ALL)
    assert engine.harmed == before, "the disk was asked although a call hangs"
    engine("close")  # one call still hangs at this point
    folder = str(engine.root / "another")
    engine("start", folder, opens_in_s=0.1)
    engine.order()
    engine("serve", *ALL)


def serve_until_usable(engine: Process) -> None:
    assert any(engine("serve", 1)["is_usable"] for _ in range(200))


def test_after_a_hanging_read_has_ended_the_disk_is_used_again(engine: Process) -> None:
    engine.order("hang 1")
    assert not engine("serve", 0)["is_usable"]
    engine.order()
    serve_until_usable(engine)
    assert fetched(engine("serve", *ALL)) > 0


def test_a_clock_that_is_set_back_changes_nothing(engine: Process, folder: Path, head_dim: int) -> None:
    """The clock is set back by a year while a call hangs: the disk's files seem to be from the future."""
    year = "clock-back 31536000"
    logged = len(engine.log)
    engine.order(year, "hang 1")
    assert not engine("serve", 0)["is_usable"]
    assert "disk_call_hangs" in engine.log[logged:]
    before = engine.harmed
    engine.order(year)
    serve_until_usable(engine)
    assert fetched(engine("serve", *ALL)) > 0
    assert engine.harmed > before, "the clock was not set"
    engine("close")
    assert engine("start", str(folder), head_dim=head_dim)["blocks"] > 0
    state = engine("serve", *ALL)
    assert (fetched(state) > 0, fetched(state, "corrupt")) == (True, 0)


def test_a_disk_that_is_removed_while_in_use_only_costs_hits(engine: Process) -> None:
    engine("serve", 0)
    engine.order("gone 1")
    state = engine("serve", *ALL, *ALL)
    assert not state["is_usable"] or fetched(state, "failed") > 0
    engine("close")
    # a new engine cannot open the disk either
    assert not engine("start", str(engine.root / "gone too"), opens_in_s=1.0)["is_usable"]
    engine("serve", *ALL)


def test_a_slow_disk_still_serves(engine: Process) -> None:
    engine.order("slow 20")
    assert fetched(engine("serve", 0)) > 0


def test_an_engine_of_another_parallel_shape_uses_another_folder(
    engine: Process, folder: Path, head_dim: int
) -> None:
    engine("close")
    assert engine("start", str(folder), ranks=2, head_dim=head_dim)["blocks"] == 0
    assert fetched(engine("serve", *ALL)) == 0


def test_missing_files_are_created_again(engine: Process, folder: Path, head_dim: int) -> None:
    for name in ("slots0", "index"):
        engine("close")
        [path] = folder.glob(f"*/replica0/{name}")
        path.unlink()
        state = engine("start", str(folder), head_dim=head_dim)
        assert (state["blocks"], state["is_usable"]) == (0, True)
        assert spilled(engine("serve", *ALL, *ALL)) > 0
