"""`kvoffload bench disk`: real files and the real copies; the engines are left to `make bench`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoffload.bench import tier_hooks
from kvoffload.bench.disk_opening import opening
from kvoffload.cli.exits import CommandError
from kvoffload.cli.main import main
from kvoffload.disk.slot_file import SlotFile

SMALL = ["bench", "disk", "--copies-only", "--mib", "1", "--block-kib", "64", "--repeats", "2"]


def test_each_way_is_held_against_the_disk_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dir", str(tmp_path), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [(line["what"], line["unit"]) for line in reported["lines"]] == [
        (f"{way} of blocks of 64 KiB{places}{part}", unit)
        for places in ("", " side by side")
        for way in ("spill", "fetch")
        for part, unit in (
            (", over a sequential pass of direct I/O", "x"),
            (", over the same on 6 threads", "x"),
            (", over the same through one buffer", "x"),
            ("", " GB/s"),
            (", processor time a GiB", " s"),
        )
    ]
    assert all(line["median"] > 0 for line in reported["lines"])
    assert list(tmp_path.iterdir()) == []


def test_an_index_is_opened_as_an_engine_does(tmp_path: Path) -> None:
    lines = list(opening(tmp_path, 100_000, 1))
    assert [line.unit for line in lines] == [" s", " s", " ms", " s"]
    assert all(line.median for line in lines)


def test_wrong_bytes_are_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SlotFile.read

    def flipped(file: SlotFile, slot: int, data: Sequence[memoryview]) -> None:
        read(file, slot, data)
        data[0][100] ^= 1

    monkeypatch.setattr(SlotFile, "read", flipped)
    assert main([*SMALL, "--dir", str(tmp_path)]) == 2
    assert "a load of the disk ended as corrupt" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dir", "/nosuch"]) == 2
    assert "--dir /nosuch: No such file or directory" in capsys.readouterr().err


def test_a_wait_in_vain_says_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_hooks, "_PATIENCE_S", 0.0)
    with pytest.raises(CommandError, match="waited in vain for the disk to open: 0 s"):
        asyncio.run(tier_hooks.until(None, "the disk to open", lambda: False))
