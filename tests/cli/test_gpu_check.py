"""`kvoffload gpu-check` runs whole on the emulated driver, finds a wrong byte, and refuses where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.bench import gpu_check, gpu_decode, gpu_lines
from kvoffload.bench.gpu_check import exit_code
from kvoffload.bench.lines import line, not_run
from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.model.transfer import Direction
from kvoffload.transfer.cuda_driver import NvidiaDriver
from kvoffload.transfer.runs import CopyRuns
from tests.cuda_emulator import Emulator, build

pytestmark = pytest.mark.timeout(300)

SMALL = ["gpu-check", "--mib", "1", "--repeats", "2"]


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.chdir(tmp_path)  # where its file goes
    monkeypatch.setattr(gpu_decode, "_STEPS", 2)
    emulator = Emulator(build())
    emulator.reset(delay_us=0)
    yield emulator
    emulator.reset(stepped=True)


@pytest.mark.slow
def test_it_runs_whole_and_writes_what_it_found(
    emulator: Emulator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--device", "cuda:1"]) == Exit.OK
    printed = capsys.readouterr().out
    assert "EMULATED DRIVER: every figure is worthless" in printed
    assert printed.count("wrong bytes after copies by") == 5
    (file,) = tmp_path.iterdir()
    assert file.name == "gpu-check-emulated-device-1.json"
    kept = json.loads(file.read_text())
    assert kept["machine"]["cuda"] == "13.0"
    lines = {one["what"]: one for one in kept["lines"]}
    checks = [one for one in lines.values() if one["is_check"]]
    figures = [one for one in lines.values() if not one["is_check"] and one["median"] is not None]
    assert {one["is_met"] for what, one in lines.items() if what.startswith("wrong bytes")} == {True}
    assert lines["wrong bytes after copies by 262,144 pieces of 4 bytes"] in checks
    assert lines["a capture survives pinning on a thread that is relaxed (1: yes)"]["is_met"]
    assert lines["a capture survives pinning on a thread that is not relaxed (1: yes)"]["median"] == 0
    assert all(what.endswith("(emulated)") for what in (one["what"] for one in figures))
    assert {one["is_met"] for one in figures} == {None}
    goals = {"at least 0.9x", "at least 0.95x", "at most 0.05 us", "at most 1.2x", "at most 1.02x"}
    assert goals <= {one["target"] for one in figures}
    stored = "a decoding step, stand-in engine (a kernel that reads memory): stored meanwhile (emulated)"
    assert lines[stored]["median"] > 0
    assert any(what.startswith("vLLM with host_bytes 64GiB: not run, ") for what in lines)
    assert sum("the page kernel takes pieces below" in what for what in lines) >= 2
    assert (emulator.faults, emulator.registrations) == (0, 1), emulator.report  # its own memory stays


def test_a_wrong_byte_ends_it_with_the_table_so_far(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = NvidiaDriver.copy

    def one_short(self: NvidiaDriver, way: Direction, runs: CopyRuns, stream: int) -> None:
        real(self, way, runs.part(1, len(runs)), stream)

    monkeypatch.setattr(NvidiaDriver, "copy", one_short)
    assert main([*SMALL, "--json"]) == Exit.FAILED
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert "bytes are wrong after copies by batches; do not offload on this machine" in lines[-1]["what"]
    assert not lines[-1]["is_met"]


def test_a_device_that_refuses_fails(emulator: Emulator, capsys: pytest.CaptureFixture[str]) -> None:
    emulator.fail("cuMemcpyBatchAsync", 2)
    assert main(SMALL) == Exit.FAILED
    assert "the driver has refused copies; the log has its error" in capsys.readouterr().out


def test_goals_are_judged_on_a_device_that_is_not_emulated(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, quick = line("a speed", [0.5], at_least=0.9), line("a time", [1.0], at_most=1.02)
    monkeypatch.setattr(gpu_lines.GpuLines, "all", lambda self: iter([quick, slow]))
    assert main(SMALL) == Exit.OK
    monkeypatch.setattr(gpu_check, "_EMULATED", "another")
    assert main(SMALL) == Exit.MISSED
    printed = capsys.readouterr().out.splitlines()
    assert [one.split()[-1] for one in printed if "0.500x" in one] == ["0.9x", "miss"]
    assert [one.split()[-1] for one in printed if "1.00x" in one] == ["1.02x", "pass"]


def test_the_exit_code_is_that_of_the_worst_line() -> None:
    good, missed = line("good", [1.0], at_least=1, is_check=True), line("missed", [0.5], at_least=1)
    wrong = line("wrong", [0.5], at_least=1, is_check=True)
    assert exit_code([good, not_run("vLLM", "it is not there")]) == Exit.OK
    assert exit_code([good, missed]) == Exit.MISSED
    assert exit_code([wrong, missed]) == Exit.FAILED
    assert (good.verdict, missed.verdict, wrong.verdict) == ("pass", "miss", "fail")


def test_without_a_gpu_it_says_so_in_one_line() -> None:
    code = (
        "import ctypes, sys\n"
        "def no(*a, **k): raise OSError('libcuda.so.1: cannot open shared object file')\n"
        "ctypes.PyDLL = no\n"
        "from kvoffload.cli.main import main\n"
        "sys.exit(main(['gpu-check']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == Exit.USAGE
    assert ended.stdout == ""
    (message,) = ended.stderr.splitlines()
    assert "there is no GPU to check: no NVIDIA driver library for cuda:0" in message


def test_work_beside_a_measurement_ends_with_it() -> None:
    with pytest.raises(ValueError, match="refused"), gpu_lines._repeated(lambda: None):
        raise ValueError("refused")
