"""`kvoffload bench copy`: a table and JSON of the same measurement, and nothing is timed that moves a wrong byte."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffload.bench import copy, copy_lanes
from kvoffload.bench.copy_rig import Rig, WrongBytes
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.model.transfer import Direction
from kvoffload.transfer import host_copier
from kvoffload.transfer.runs import CopyRuns

SMALL = ["bench", "copy", "--device", "cpu", "--mib", "1"]
PAGE = 4096


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[CopyRuns], None]], None]:
    """Breaks the copier: what is handed in follows each of its copies."""

    def break_with(spoil: Callable[[CopyRuns], None]) -> None:
        def copy(runs: CopyRuns) -> None:
            host_copier.copy_by_memmove(runs)
            spoil(runs)

        monkeypatch.setattr(host_copier, "choose_copy", lambda **_: copy)

    return break_with


def flip(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 1


@pytest.mark.slow
def test_the_table_has_each_page_way_and_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--page-kib", "4", "64", "--repeats", "6"]) == Exit.OK
    reported = capsys.readouterr().out.splitlines()
    assert "there is no GPU here" in reported[1] or "cuda" in reported[0]
    found = [line for line in reported if "scattered pages of" in line and "over one large copy" in line]
    cases = [("store", "1 thread"), ("load", "1 thread"), ("load", "2 threads")]
    assert [line.partition(", over")[0] for line in found] == [
        f"{way} of scattered pages of {page} KiB, {threads}" for page in (4, 64) for way, threads in cases
    ]
    assert all("[" in line for line in found)
    assert any("while" in line for line in reported)
    assert "adjacent blocks" in reported[-1]


@pytest.mark.slow
def test_json_and_the_saved_file_hold_the_same_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--page-kib", "16", "--repeats", "2", "--threads", "1", "--json"]
    assert main([*SMALL, *options, "--save", str(tmp_path / "results")]) == Exit.OK
    reported = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert len(reported["lines"]) == 8
    assert all(line["median"] > 0 for line in reported["lines"])
    assert {line["low"] for line in reported["lines"]} == {None}  # two pairs have no interval
    (saved,) = (tmp_path / "results").iterdir()
    assert json.loads(saved.read_text())["lines"] == reported["lines"]


@pytest.mark.parametrize("way", list(Direction))
def test_a_wrong_byte_is_found_before_anything_is_timed(
    way: Direction,
    broken: Callable[[Callable[[CopyRuns], None]], None],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(runs: CopyRuns) -> None:
        if runs.total_bytes == 2**20:
            flip(int(runs.target[-1] + runs.size[-1]) - 1)

    broken(late)
    monkeypatch.setitem(copy.WAYS, "store", (way,))  # the first that is measured
    monkeypatch.setattr(Rig, "in_one_piece", lambda *_: pytest.fail("it was timed"))
    assert main([*SMALL, "--page-kib", "4", "--repeats", "1"]) == Exit.FAILED
    out, err = capsys.readouterr()
    assert not out
    assert f"FAILED: {way.value}, pages of 4096 bytes: 1 bytes are wrong" in err


def test_a_byte_beside_the_blocks_is_found_too(broken: Callable[[Callable[[CopyRuns], None]], None]) -> None:
    touched: list[int] = []

    def beside(runs: CopyRuns) -> None:
        # The page behind one that was written, itself not written.
        free = np.setdiff1d(runs.target + PAGE, runs.target)
        touched.append(int(free[0]))
        flip(touched[-1])

    broken(beside)
    with Rig("cpu", PAGE, 2**20) as rig, pytest.raises(WrongBytes, match="wrong on the host"):
        rig.check([Direction.STORE])
    assert touched


def test_a_load_that_brings_wrong_bytes_is_not_timed_behind_stores(
    broken: Callable[[Callable[[CopyRuns], None]], None],
) -> None:
    spoilt: list[int] = []

    def once(runs: CopyRuns) -> None:
        if not spoilt:
            spoilt.append(int(runs.target[0]))
            flip(spoilt[0])

    broken(once)
    with pytest.raises(WrongBytes, match="differs"):
        list(copy_lanes.measure_loads("cpu", 2**20, 1))


def test_a_copy_that_fails_is_not_timed(broken: Callable[[Callable[[CopyRuns], None]], None]) -> None:
    def fail(runs: CopyRuns) -> None:
        raise OSError("torn")

    broken(fail)
    with pytest.raises(WrongBytes, match="ended as failed"):
        list(copy_lanes.measure_loads("cpu", 2**20, 1))


@pytest.mark.parametrize(
    "options", [["--mib", "0"], ["--page-kib", "x"], ["--threads", "-1"], ["--device", "tpu"]]
)
def test_bad_options_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "copy", *options])
    assert ended.value.code == Exit.USAGE
    assert options[0] in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "copy", "--device", "cuda"]) == Exit.USAGE
    assert "no CUDA device" in capsys.readouterr().err
    assert "no GPU here" in copy.find_device("auto")[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TRITON_")  # of its own defaults
@pytest.mark.parametrize("page", [4096, 65536, 2**21])
@pytest.mark.parametrize("way", list(copy.WAYS))
@pytest.mark.parametrize("path", ["", "engine", "kernel"])
def test_on_a_device_every_byte_arrives_each_way_and_both_at_once(page: int, way: str, path: str) -> None:
    with Rig("cuda:0", page, 2**24) as rig:
        rig.use(path)
        rig.check(copy.WAYS[way])
        assert rig.in_one_piece(copy.WAYS[way]) > 0
