"""What the doctor says of host memory in files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.checks import memory
from kvoffload.checks.startup import examine_rank
from kvoffload.node.file_systems import free_bytes
from kvoffload.node.folder import list_kept
from kvoffload.testing import FakeDevice
from kvoffload.transfer.host_memory import RESERVE
from tests.doctor.trees import GIB, ask, machine, setup
from tests.reference.rig import rig
from tests.settings import make_config

MIB = 2**20
LAYOUT = FakeDevice(9, [65536, 65536]).layout


@contextmanager
def engine(folder: Path, weights: str) -> Iterator[None]:
    """Run an engine with host memory in `folder`. Engines with other weights are of another kind."""
    with rig(host_blocks=1000, extra={"host_path": folder, "weights_id": weights}) as made:
        made.drain()
        yield


def stopped(folder: Path, *weights: str) -> int:
    """Leave the memory of stopped engines in a folder; return its bytes."""
    for each in weights:
        with engine(folder, each):
            pass
    return sum(kept.size for kept in list_kept(folder))


def sized(monkeypatch: pytest.MonkeyPatch, size: int, left: int) -> None:
    found = SimpleNamespace(f_blocks=size // 4096, f_bavail=left // 4096, f_frsize=4096, f_bsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


def asked(name: str, folder: Path, tmp_path: Path, **settings: object) -> tuple[str, str]:
    given: dict[str, Any] = {"host_bytes": 64 * MIB, **settings}
    known = setup(host_path=folder, **given)
    return ask(memory.CHECKS, name, known, machine(tmp_path))


def test_a_folder_that_is_not_on_a_tmpfs_is_an_error(tmp_path: Path) -> None:
    verdict, text = asked("host path", tmp_path / "below", tmp_path)
    assert (verdict, "it must be on tmpfs" in text) == ("error", True)


def test_a_path_that_cannot_be_a_folder_is_an_error(shared_memory: Path, tmp_path: Path) -> None:
    (shared_memory / "file").touch()
    verdict, text = asked("host path", shared_memory / "file" / "below", tmp_path)
    assert (verdict, "is not a folder in which" in text) == ("error", True)
    verdict, text = asked("host path", shared_memory / ("long" * 99), tmp_path)
    assert (verdict, "File name too long" in text) == ("error", True)


@pytest.mark.parametrize(
    ("size", "left", "verdict", "said"),
    [
        (GIB, 65 * MIB, "ok", "64.0 MiB fit: the tmpfs of "),
        (GIB, 63 * MIB, "error", "64.0 MiB do not fit: the tmpfs of "),
        (0, 0, "ok", " has no limit"),
        (64 * MIB, 60 * MIB, "error", "of 64.0 MiB, a container's default, has 60.0 MiB left"),
    ],
)
def test_the_tmpfs_must_have_room(
    size: int,
    left: int,
    verdict: str,
    said: str,
    shared_memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sized(monkeypatch, size, left)
    found = asked("host path", shared_memory / "not yet made", tmp_path)
    assert found[0] == verdict
    assert said in found[1]


def test_huge_pages_must_be_in_the_pool(shared_memory: Path, huge_pages: Path, tmp_path: Path) -> None:
    known: dict[str, Any] = {"host_path": shared_memory, "host_hugetlbfs": huge_pages}
    stopped(shared_memory, "on the tmpfs")
    for size, verdict, said in (
        (64 * MIB, "ok", "64.0 MiB fit: the pool of "),
        (free_bytes(huge_pages), "warning", "may not fit, they need up to "),
        (free_bytes(huge_pages) + 1, "error", "do not fit"),
    ):
        found = ask(memory.CHECKS, "host path", setup(host_bytes=size, **known), machine(tmp_path))
        assert (found[0], said in found[1]) == (verdict, True)
    found = ask(memory.CHECKS, "host memory", setup(host_bytes=GIB, **known), machine(tmp_path))
    assert (found[0], "from the pool of huge pages" in found[1]) == ("ok", True)


def test_memory_of_stopped_engines_counts_as_room_and_that_of_running_ones_does_not(
    shared_memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stopped(shared_memory, "a")
    sized(monkeypatch, GIB, 64 * MIB - before)
    assert asked("host path", shared_memory, tmp_path)[0] == "ok"
    with engine(shared_memory, "a"):
        assert asked("host path", shared_memory, tmp_path)[0] == "error"


@pytest.mark.parametrize("spare", [2**20, -(2**20)])
def test_memory_that_an_earlier_engine_left_is_not_needed_again(
    spare: int, shared_memory: Path, tmp_path: Path
) -> None:
    before = stopped(shared_memory, "a", "b")
    left = RESERVE + 64 * MIB - before + spare
    small = machine(tmp_path, {"proc/meminfo": f"MemAvailable: {left // 1024} kB\n"})
    known = setup(host_path=shared_memory, host_bytes=64 * MIB)
    verdict, text = ask(memory.CHECKS, "host memory", known, small)
    assert verdict == ("ok" if spare > 0 else "error")
    assert "of which the files of stopped engines have" in text


@pytest.mark.parametrize(("allowed", "verdict"), [(1024, "warning"), (None, "ok")])
def test_memory_beyond_what_stopped_engines_may_keep_is_a_warning(
    allowed: int | None, verdict: str, shared_memory: Path, tmp_path: Path
) -> None:
    stopped(shared_memory, "a", "b")
    found = asked(
        "kept memory", shared_memory, tmp_path, **({"host_orphan_bytes": allowed} if allowed else {})
    )
    assert found[0] == verdict
    assert "in 2 folders below" in found[1]


def test_the_memory_that_the_next_engine_takes_over_is_not_beyond_the_bound(
    shared_memory: Path, tmp_path: Path
) -> None:
    stopped(shared_memory, "a")
    assert asked("kept memory", shared_memory, tmp_path, host_orphan_bytes=1024)[0] == "ok"


def test_engines_that_run_are_named_with_their_processes(shared_memory: Path, tmp_path: Path) -> None:
    with engine(shared_memory, "a"):
        verdict, text = asked("kept memory", shared_memory, tmp_path)
    assert verdict == "ok"
    assert f"(processes {os.getpid()}), beside which" in text


def test_a_start_does_not_count_the_files_that_its_other_ranks_have_taken_over(
    shared_memory: Path, tmp_path: Path
) -> None:
    config = make_config(host_path=shared_memory, host_bytes=64 * 131072)
    tight = machine(tmp_path, {"proc/meminfo": f"MemAvailable: {(RESERVE + 2**20) // 1024} kB\n"})
    with engine(shared_memory, "a"), tight:
        assert examine_rank(0, 2, config, LAYOUT) == []


def test_without_host_path_nothing_is_said_of_it(tmp_path: Path) -> None:
    with machine(tmp_path):
        found = {one.name for one in memory.CHECKS if one.find(setup()) is not None}
    assert {"host path", "kept memory"}.isdisjoint(found)
