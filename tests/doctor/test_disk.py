"""What the doctor says of the disk below the host, on real folders."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvoffload.checks import disk
from kvoffload.checks.check import Setup, Verdict, run_checks
from kvoffload.checks.machine import Machine, Space
from kvoffload.model.config import OffloadConfig

GIB = 2**30


def setup(path: Path | None, **given: object) -> Setup:
    config = replace(OffloadConfig(), disk_path=path, disk_bytes=GIB)
    return Setup(config=replace(config, **given))  # type: ignore[arg-type]


def found(setup: Setup, name: str, machine: Machine | None = None) -> tuple[Verdict, str]:
    (answer,) = run_checks([one for one in disk.CHECKS if one.name == name], setup, machine or Machine())
    return answer.finding.verdict, answer.finding.text


def leave(path: Path, name: str, size: int, days: float = 0.0) -> None:
    folder = path / name / "replica0"
    folder.mkdir(parents=True)
    (folder.parent / "identity.json").write_text("{}")
    (folder / "slots0").write_bytes(b"\1" * size)
    for file in (folder / "slots0", folder.parent / "identity.json"):
        when = file.stat().st_mtime - days * 86400
        os.utime(file, (when, when))


def test_without_a_disk_there_is_nothing_to_check() -> None:
    for one in disk.CHECKS:
        assert found(setup(None), one.name) == (Verdict.GO, "none: no disk_path is set")


@pytest.mark.parametrize(
    ("replicas", "free", "verdict"),
    [(1, 2 * GIB, Verdict.GO), (2, 2 * GIB, Verdict.GO), (3, 2 * GIB, Verdict.NO_GO)],
)
def test_the_space_of_all_replicas_must_be_free(
    tmp_path: Path, replicas: int, free: int, verdict: Verdict
) -> None:
    machine = Machine(space=lambda _: Space(9 * GIB, free))
    said, text = found(replace(setup(tmp_path), replicas=replicas), "disk space", machine)
    assert said is verdict
    assert text.startswith(f"{replicas:.1f} GiB of {replicas} engine")


def test_space_by_rank_needs_their_number(tmp_path: Path) -> None:
    by_rank = setup(tmp_path, disk_bytes_per_rank=GIB)
    assert found(by_rank, "disk space")[0] is Verdict.UNKNOWN
    machine = Machine(space=lambda _: Space(9 * GIB, 3 * GIB))
    assert found(replace(by_rank, ranks=4), "disk space", machine)[0] is Verdict.NO_GO
    assert found(replace(by_rank, ranks=2), "disk space", machine)[0] is Verdict.GO


def test_what_earlier_engines_left_may_be_this_ones(tmp_path: Path) -> None:
    leave(tmp_path, "a" * 32, 2**20)
    machine = Machine(space=lambda _: Space(9 * GIB, GIB - 2**19))
    assert found(setup(tmp_path), "disk space", machine)[0] is Verdict.WARNING


def test_folders_of_several_models_are_listed_with_size_and_age(tmp_path: Path) -> None:
    assert found(setup(tmp_path), "disk leftovers") == (Verdict.GO, "the folder holds nothing yet")
    leave(tmp_path, "a" * 32, 2**20, days=31)
    assert found(setup(tmp_path), "disk leftovers")[0] is Verdict.GO
    leave(tmp_path, "b" * 32, 2**21)
    verdict, text = found(setup(tmp_path), "disk leftovers")
    assert verdict is Verdict.WARNING
    assert text.startswith(
        "2 folders with 3.0 MiB: bbbbbbbbbbbb (2.0 MiB, unused for 0 days), aaaaaaaaaaaa (1.0 MiB"
    )
    assert "unused for 31 days" in text


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("ext4", Verdict.GO),
        ("tmpfs", Verdict.WARNING),
        ("nfs4", Verdict.WARNING),
        ("fuse.sshfs", Verdict.WARNING),
    ],
)
def test_the_file_system_is_that_of_the_longest_mount_point(
    tmp_path: Path, kind: str, verdict: Verdict
) -> None:
    table = (
        f"1 0 8:1 / / rw - btrfs /dev/a rw\n2 1 8:2 / {tmp_path} rw,relatime shared:1 - {kind} /dev/b rw\n"
    )
    machine = Machine(read=lambda _: table)
    assert found(setup(tmp_path / "not" / "there"), "disk file system", machine)[0] is verdict


def test_a_folder_in_which_every_user_may_rename_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    verdict, text = found(setup(tmp_path / "disk"), "disk owners")
    assert verdict is Verdict.WARNING
    assert f"every user may rename and remove what is in {tmp_path}" in text
    tmp_path.chmod(0o1777)
    assert found(setup(tmp_path / "disk"), "disk owners")[0] is Verdict.GO


def test_speed_is_measured_and_weighed_and_nothing_is_left(tmp_path: Path) -> None:
    sized = replace(setup(tmp_path / "new"), block_bytes=2**20, block_tokens=16)
    verdict, text = found(sized, "disk speed")
    assert verdict in (Verdict.GO, Verdict.WARNING)  # as the file system of the test takes direct I/O
    assert "MB/s and reads" in text
    assert "so a fetch pays where the engine prefills fewer" in text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_a_no_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "measure", refuse)
    assert found(setup(tmp_path), "disk speed") == (
        Verdict.NO_GO,
        f"{tmp_path} cannot be written: Permission denied",
    )


def test_a_drain_must_end_before_the_workers_are_ended(tmp_path: Path) -> None:
    assert found(setup(tmp_path), "disk drain")[0] is Verdict.GO
    assert found(setup(tmp_path, drain_s=5.0), "disk drain")[0] is Verdict.WARNING
