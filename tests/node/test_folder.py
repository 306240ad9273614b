"""Which folder an engine gets below `host_path`, and which folders of others are removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvoffload.disk.identity import KVIdentity
from kvoffload.disk.open_folder import OpenFolder
from kvoffload.model.errors import ConfigError
from kvoffload.node import folder
from kvoffload.node.file_systems import check_free, free_bytes
from kvoffload.node.folder import Claim, HostPlace, bound_orphans, list_kept, make_room, remove_kept
from kvoffload.node.processes import Process, may_run, this_process
from tests.captured_logs import capture_logs
from tests.mounts import mounted


def place(root: Path, engine: str, kind: str = "kind") -> HostPlace:
    return HostPlace(root, kind, engine, lambda: KVIdentity("", "", "", {}))


def number(claim: Claim) -> int:
    return int(claim.folder.path.name)


def fill(claim: Claim, size: int) -> None:
    with os.fdopen(claim.folder.make_file("rank0"), "wb") as file:
        file.write(b"x" * size)


def test_all_processes_of_an_engine_get_one_folder_and_other_engines_another(shared_memory: Path) -> None:
    claims = [place(shared_memory, engine).claim() for engine in "aabab"]
    assert [number(claim) for claim in claims] == [0, 0, 1, 0, 1]
    assert number(place(shared_memory, "a", "other kind").claim()) == 0


def test_engines_that_start_at_once_never_share_a_folder(shared_memory: Path) -> None:
    with ThreadPoolExecutor(16) as threads:
        engines = [str(engine) for engine in range(8)] * 2
        claims = list(threads.map(lambda engine: place(shared_memory, engine).claim(), engines))
    used = dict(zip(engines, map(number, claims), strict=True))
    assert [number(claim) for claim in claims] == [used[engine] for engine in engines]
    assert sorted(used.values()) == [*range(8)]


def test_a_folder_is_free_once_all_processes_of_its_engine_have_left_it(shared_memory: Path) -> None:
    first, second = place(shared_memory, "a").claim(), place(shared_memory, "a").claim()
    first.close()
    assert number(place(shared_memory, "b").claim()) == 1
    second.close()
    assert number(place(shared_memory, "c").claim()) == 0


def test_the_fullest_orphan_is_taken_first(shared_memory: Path) -> None:
    claims = [place(shared_memory, engine).claim() for engine in "abc"]
    for claim, size in zip(claims, (2, 30_000, 9_000), strict=True):
        fill(claim, size)
        claim.close()
    assert [number(place(shared_memory, engine).claim()) for engine in "defg"] == [1, 2, 0, 3]


def test_a_process_that_left_cleanly_is_no_former_process(shared_memory: Path) -> None:
    claims = [place(shared_memory, "a").claim() for _ in range(3)]
    claims[0].close()
    claims[1].close(may_still_write=True)
    claims[2].close()
    after = place(shared_memory, "b").claim()
    assert set(after.former) == {this_process()}
    after.close()
    # It is still not gone when the third engine begins.
    assert set(place(shared_memory, "c").claim().former) == {this_process()}


def test_after_a_broken_owner_file_an_unknown_process_may_still_write(shared_memory: Path) -> None:
    claim = place(shared_memory, "a").claim()
    (claim.folder.path / "owner.json").write_bytes(b'{"engine": "a", "proc')
    claim.folder.close()
    (process,) = place(shared_memory, "b").claim().former
    assert may_run(process) is None


def test_a_folder_of_other_users_is_refused(shared_memory: Path) -> None:
    (shared_memory / "kind").mkdir(mode=0o777)
    (shared_memory / "kind").chmod(0o777)
    with pytest.raises(
        ConfigError, match=r"host_path: .*/kind cannot be used: .* group and others cannot write"
    ):
        place(shared_memory, "a").claim()


def test_a_claim_that_fails_because_the_tmpfs_is_full_keeps_no_folder() -> None:
    with mounted("tmpfs", "size=64k") as root:
        place(root, "a").claim().close()
        (root / "full").write_bytes(b"x" * free_bytes(root))
        with pytest.raises(
            ConfigError, match=r"No space left on device; remove .* --orphans\), or make it larger"
        ):
            place(root, "b").claim()
        (kept,) = list_kept(root)
        assert kept.is_orphan


def test_a_process_that_never_stops_choosing_is_an_error(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PAUSE_S", 0.0)
    place(shared_memory, "a").claim()
    with OpenFolder(shared_memory / "kind", os.open(shared_memory / "kind", os.O_RDONLY)) as kind:
        with folder._choosing(kind), pytest.raises(ConfigError, match=r"another process has locked .*claims"):
            place(shared_memory, "b").claim()
        assert number(place(shared_memory, "b").claim()) == 1


def test_a_process_that_ends_waits_at_most_a_second_for_one_that_is_choosing(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("kvoffload.node.folder.time.sleep", pauses.append)
    claim = place(shared_memory, "a").claim()
    kind = OpenFolder(shared_memory / "kind", os.open(shared_memory / "kind", os.O_RDONLY))
    with kind, folder._choosing(kind):
        claim.close()
    assert 0 < sum(pauses) <= 1.001
    (kept,) = list_kept(shared_memory)
    assert kept.is_orphan


def orphans(root: Path, *sizes: int, kind: str = "kind") -> list[Path]:
    """Leave folders without an engine, each with this many bytes, the least recently begun first."""
    claims = [place(root, f"{kind} {engine}", kind).claim() for engine in range(len(sizes))]
    for age, (claim, size) in enumerate(zip(claims, sizes, strict=True)):
        fill(claim, size)
        claim.close()
        os.utime(claim.folder.path / "owner.json", (1000 + age, 1000 + age))
    return [claim.folder.path for claim in claims]


def test_orphans_beyond_the_bound_are_removed_the_oldest_first(shared_memory: Path) -> None:
    old, middle, new = orphans(shared_memory, 400_000, 100_000, 300_000)
    bound_orphans(shared_memory, 450_000)
    assert [path.exists() for path in (old, middle, new)] == [False, True, True]
    bound_orphans(shared_memory, 0)
    assert list_kept(shared_memory) == []


def test_orphans_of_other_kinds_make_room_first_and_only_while_room_is_needed(shared_memory: Path) -> None:
    same = orphans(shared_memory, 10_000, 10_000)
    others = orphans(shared_memory, 10_000, 10_000, kind="other")
    mine = place(shared_memory, "mine")
    claim = mine.claim()
    asked: list[list[bool]] = []

    def fits(freed: int) -> bool:
        if freed:
            return freed == sum(kept.size for kept in list_kept(shared_memory) if kept.is_orphan)
        asked.append([path.exists() for path in (*others, *same)])
        return len(asked) == 4

    make_room(mine, fits)
    (kept,) = (path for path in same if path.exists())
    assert kept == claim.folder.path
    assert asked[:3] == [[True, True, True, True], [False, True, True, True], [False, False, True, True]]


def test_orphans_stay_if_memory_would_not_even_fit_without_them(shared_memory: Path) -> None:
    paths = orphans(shared_memory, 10_000, 10_000, kind="other")
    mine = place(shared_memory, "mine")
    claim = mine.claim()
    make_room(mine, lambda freed: False)
    assert all(path.exists() for path in paths)
    claim.close()


def test_memory_in_use_is_never_removed(shared_memory: Path) -> None:
    claim = place(shared_memory, "a").claim()
    (kept,) = list_kept(shared_memory)
    assert (kept.is_orphan, kept.owner.engine) == (False, "a")
    assert not remove_kept(kept)
    bound_orphans(shared_memory, 0)
    assert claim.folder.path.exists()
    claim.close()
    (kept,) = list_kept(shared_memory)
    assert kept.is_orphan
    assert remove_kept(kept)
    assert not remove_kept(kept)


def test_what_engines_have_not_made_is_neither_listed_nor_changed_nor_removed(shared_memory: Path) -> None:
    (shared_memory / "weights.json").touch()
    for name in ("photos/2026", "photos/1", "linked"):
        (shared_memory / name).mkdir(parents=True)
        (shared_memory / name / "one").write_bytes(bytes(9000))
    for path in (shared_memory / "photos", *(shared_memory / "photos").iterdir()):
        path.chmod(0o755)
    (path,) = orphans(shared_memory, 5000)
    (path.parent / "7").mkdir()
    (path.parent / "7" / "mine").touch()
    (path.parent / "8").symlink_to(shared_memory / "linked")
    (shared_memory / "linked" / "owner.json").touch()

    def look() -> dict[Path, int]:
        return {
            each: each.lstat().st_mode for each in shared_memory.rglob("*") if not each.is_relative_to(path)
        }

    before = look()
    assert [kept.path for kept in list_kept(shared_memory)] == [path]
    (path / "a letter").touch()
    bound_orphans(shared_memory, 0)
    make_room(place(shared_memory, "mine"), bool)
    assert look() == before
    assert [each.name for each in path.iterdir()] == ["a letter"]
    assert list_kept(shared_memory / "missing") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_that_cannot_be_read_hides_no_other(shared_memory: Path) -> None:
    shared_memory.chmod(0o777)
    (shared_memory / "earlier").mkdir(mode=0o700)
    try:
        os.seteuid(65534)
        (path,) = orphans(shared_memory, 5000)
        os.seteuid(0)
        (shared_memory / "later").mkdir(mode=0o700)
        os.seteuid(65534)
        assert [kept.path for kept in list_kept(shared_memory)] == [path]
    finally:
        os.seteuid(0)


def test_a_refused_folder_hides_no_other_of_its_kind(shared_memory: Path) -> None:
    first, second, third = orphans(shared_memory, 5000, 5000, 5000)
    second.chmod(0o777)
    with capture_logs() as logs:
        assert [kept.path for kept in list_kept(shared_memory)] == [first, third]
    assert [(line["event"], line["folder"]) for line in logs] == [("host_memory_not_listed", str(second))]


def test_memory_whose_kind_another_process_has_locked_is_not_left_out_silently(
    shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PAUSE_S", 0.0)
    orphans(shared_memory, 5000)
    kind = OpenFolder(shared_memory / "kind", os.open(shared_memory / "kind", os.O_RDONLY))
    with kind, folder._choosing(kind), capture_logs() as logs:
        assert list_kept(shared_memory) == []
    (line,) = logs
    assert line["event"] == "host_memory_not_listed"
    assert "another process has locked" in line["reason"]


def test_a_tmpfs_without_a_limit_has_room(shared_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096, f_bsize=4096)
    )
    check_free(shared_memory, None, 2**60)


def test_a_tmpfs_that_is_too_small_is_an_error_that_says_how_to_enlarge_it(shared_memory: Path) -> None:
    check_free(shared_memory, None, free_bytes(shared_memory) // 2)
    with pytest.raises(ConfigError, match=r"the tmpfs of .* has .* left, and host_bytes needs .* --shm-size"):
        check_free(shared_memory, None, free_bytes(shared_memory) * 2)


# -- processes -------------------------------------------------------------------------------------------------------


def started(code: str) -> tuple[subprocess.Popen[bytes], Process]:
    """Start a process that prints a line once it runs `code`; return it with its name."""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()
    return child, Process(child.pid, int(stat[19]), this_process().namespace)


SLEEPS = "import time; print(flush=True); time.sleep(1000)"


def test_a_process_may_run_until_it_has_ended(shared_memory: Path) -> None:
    child, process = started(SLEEPS)
    assert may_run(process) is True
    assert may_run(process._replace(started=process.started - 1)) is False  # the number was used again
    assert may_run(process._replace(namespace="pid:[1]")) is None
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert may_run(process) is False  # a zombie
    child.communicate()
    assert may_run(process) is False


def test_a_process_whose_first_thread_has_ended_still_runs() -> None:
    code = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: (print(flush=True), time.sleep(1000))).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"  # exit of this thread alone, on x86
    )
    if os.uname().machine != "x86_64":
        code = code.replace("60, 0", "93, 0")
    child, process = started(code)
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2].split()[0] != "Z":
        pass
    assert may_run(process) is True
    child.kill()
    child.communicate()
    assert may_run(process) is False
