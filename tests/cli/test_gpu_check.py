"""`kvoffload gpu-check` runs whole on the emulated driver, finds a wrong byte, and refuses where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.bench import gpu_lines
from kvoffload.cli.main import main
from kvoffload.model.transfer import Direction
from kvoffload.transfer.cuda_driver import NvidiaDriver
from kvoffload.transfer.runs import CopyRuns
from tests.cuda_emulator import Emulator, build

SMALL = ["gpu-check", "--mib", "1", "--repeats", "2"]


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    emulator = Emulator(build())
    emulator.reset(delay_us=5)
    yield emulator
    emulator.reset(stepped=True)


@pytest.mark.slow
def test_it_runs_whole_and_writes_what_it_found(
    emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--device", "cuda:1", "--save", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "emulated device 1: byte equality first" in printed
    assert printed.count("wrong bytes after copies by") == 2
    (file,) = tmp_path.iterdir()
    lines = {one["what"]: one for one in json.loads(file.read_text())["lines"]}
    assert all(one["is_met"] for what, one in lines.items() if what.startswith("wrong bytes"))
    assert lines["a capture survives pinning on a thread that is relaxed (1: yes)"]["is_met"]
    assert lines["a capture survives pinning on a thread that is not relaxed (1: yes)"]["median"] == 0
    assert {"at least 0.9x", "at least 0.95x", "at most 0.05 us"} <= {one["target"] for one in lines.values()}
    assert emulator.faults == 0, emulator.report


def test_a_wrong_byte_ends_it(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = NvidiaDriver.copy

    def one_short(self: NvidiaDriver, way: Direction, runs: CopyRuns, stream: int) -> None:
        real(self, way, CopyRuns(runs.source[1:], runs.target[1:], runs.size[1:]), stream)

    monkeypatch.setattr(NvidiaDriver, "copy", one_short)
    assert main(SMALL) != 0
    assert (
        "bytes are wrong after copies by batches; do not offload on this machine" in capsys.readouterr().err
    )


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    code = (
        "import ctypes, sys\n"
        "def no(*a, **k): raise OSError('libcuda.so.1: cannot open shared object file')\n"
        "ctypes.PyDLL = no\n"
        "from kvoffload.cli.main import main\n"
        "sys.exit(main(['gpu-check']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "there is no GPU to check: no NVIDIA driver library for cuda:0" in line


def test_work_beside_a_measurement_ends_with_it() -> None:
    with pytest.raises(ValueError, match="refused"), gpu_lines._repeated(lambda: None):
        raise ValueError("refused")
