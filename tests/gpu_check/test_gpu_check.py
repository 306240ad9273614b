from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.gpu_check import command, copies, hazards, latencies
from kvoffload.gpu_check.parts import CheckPart, Line, Options, asked, measured
from kvoffload.gpu_check.rig import Rig
from kvoffload.model.wire import Direction
from kvoffload.transfer import factory
from kvoffload.transfer.cuda import crossover
from kvoffload.transfer.cuda.copier import CudaCopier, GpuProfile, profile_path, read_profile
from kvoffload.transfer.cuda.driver import NvidiaDriver
from tests.captured_logs import capture_logs
from tests.cuda_emulator import Emulator, Engine
from tests.cuda_emulator.page_kernel import install

pytestmark = pytest.mark.timeout(300)

OPTIONS = Options("cuda:0", 1 << 20, 1, 1 << 30)
SMALL = ["gpu-check", "--copy-bytes", "1MiB", "--repeats", "1"]
HERE = "tests.gpu_check.parts"
NO_KERNEL = "not asked: no page kernel, ModuleNotFoundError: "


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.slow
def test_gpu_check_runs_completely_and_writes_every_line(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        name: replace(part, where=f"{HERE}:small", arguments=(part.where, *part.arguments))
        for name, part in command.parts().items()
    }
    monkeypatch.setattr(command, "parts", lambda: small)
    assert main([*SMALL, "--device", "cuda:1"]) == Exit.OK
    out, said = capsys.readouterr()
    printed = out.splitlines()
    assert said.endswith(f"kvoffload: passed; all {len(printed)} lines are in gpu-check.json\n")
    lines = {one["what"]: one for one in json.loads((tmp_path / "gpu-check.json").read_text())["lines"]}
    assert len(printed) == len(lines)
    assert lines["GPU"]["words"].startswith("emulated device 1, CUDA 13.0")
    wrong = [one for what, one in lines.items() if what.startswith("wrong bytes")]
    assert sum(one.get("is_met", False) for one in wrong) == 2 * 2  # two directions times two sizes
    figures = [one for one in lines.values() if one.get("unit")]
    assert all(one["what"].endswith("(emulated)") and "is_met" not in one for one in figures)
    goals = {"at least 0.9x", "at least 0.95x", "at most 5 ms"}
    assert goals <= {one.get("target") for one in figures}
    assert lines["exit code of a worker that only ends with copies under way"]["is_met"]
    assert lines["vllm"]["words"].startswith("not asked: ")


def test_a_wrong_byte_ends_gpu_check_with_its_own_exit_code(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMULATOR_SPOILS", "1")
    assert main([*SMALL, "--json"]) == Exit.FAILED
    printed, said = capsys.readouterr()
    lines = [json.loads(line) for line in printed.splitlines()]
    assert lines[-1]["median"] > 0
    assert "\nkvoffload: failed (see `fail`): do not offload on this machine; all " in said
    assert [line["what"] for line in lines if line.get("is_last")] == [lines[-1]["what"]]
    assert lines[-1]["what"].startswith("wrong bytes, in batches")


def test_other_failures_do_not_end_gpu_check(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "device": CheckPart("GPU", f"{HERE}:device", 60),
        "crash": CheckPart("a crash", f"{HERE}:crashes", 60),
        "last": CheckPart("the last", f"{HERE}:raises", 60, is_check=True),
    }
    monkeypatch.setattr(command, "parts", lambda: parts)
    assert main([*SMALL, "--only", "crash"]) == Exit.MISSED
    assert main(SMALL) == Exit.FAILED
    assert capsys.readouterr().out.splitlines()[-1] == "fail  the last: ValueError: no such thing: | none"


def test_each_part_is_named_before_it_runs(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {
        "device": CheckPart("GPU", f"{HERE}:device", 60),
        "ends": CheckPart("a part that ends", f"{HERE}:leaves", 90),
    }
    monkeypatch.setattr(command, "parts", lambda: parts)
    with redirect_stdout(sys.stderr):
        main(SMALL)
    assert [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()[:-1]] == [
        "checking GPU, at most 60 s",
        "a device for tests",
        "checking a part that ends, at most 90 s",
        "found",
        "ended with 7",
    ]


def test_an_unknown_part_is_one_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--only", "bites"]) == Exit.USAGE
    assert list(tmp_path.iterdir()) == []
    assert "unknown part 'bites'; choose from device, bytes, speeds, " in capsys.readouterr().err


def test_an_output_in_the_logs_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = tmp_path / "run.log"
    there.write_text("an earlier run")
    assert main(["gpu-check", "--output", str(there)]) == Exit.USAGE
    assert "must not end in .log" in capsys.readouterr().err
    assert there.read_text() == "an earlier run"


def test_without_a_gpu_it_says_so_and_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes\ndef no(*a, **k): raise OSError('libcuda.so.1: cannot open shared object file')\nctypes.PyDLL = no\n"
    )
    paths = f"{tmp_path}:" + ":".join(sys.path)
    environment = {"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "kvoffload", "gpu-check"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    assert ended.returncode == Exit.USAGE
    assert ended.stdout == ""
    assert list(folder.iterdir()) == []
    _, message = ended.stderr.splitlines()
    assert "there is no GPU to check: no NVIDIA driver library for cuda:0" in message
    log = folder / "gpu-check.log"
    log.write_text("an earlier run")
    assert subprocess.run(command, check=False, capture_output=True, cwd=folder, env=environment).returncode
    assert log.read_text() == "an earlier run"
    assert list(folder.iterdir()) == [log]


def test_each_line_has_a_verdict_and_together_they_determine_the_exit_code() -> None:
    lines = [
        measured("quick", [1.0, 1.5], " us", at_most=2),
        measured("slow", [0.5], "x", at_least=0.9),
        Line("wrong", words="3 bytes", is_met=False, is_check=True),
    ]
    assert [command.exit_code(lines[:count]) for count in (1, 2, 3)] == [Exit.OK, Exit.MISSED, Exit.FAILED]
    assert [line.text for line in lines] == [
        "pass  quick: 1.25 us [1, 1.50] (at most 2 us)",
        "miss  slow: 0.500x (at least 0.9x)",
        "fail  wrong: 3 bytes",
    ]


# -- parts, in this process -------------------------------------------------------------------------------------------


def test_no_copy_races_with_the_allocation_of_its_memory(emulator: Emulator) -> None:
    """The driver allocates memory in the order of one stream, and the copier uses other streams."""
    emulator.reset(delay_us=200)
    lines = [*copies.compared(OPTIONS), *copies.speeds(OPTIONS)]
    assert (emulator.races, emulator.faults) == (0, 0), emulator.report
    assert not [line for line in lines if line.verdict == "fail"]


def test_without_a_page_kernel_every_line_has_the_reason(emulator: Emulator) -> None:
    lines = [
        *copies.compared(OPTIONS),
        *copies.speeds(OPTIONS),
        *asked("how the page kernel is best used", copies.profile(OPTIONS)),
    ]
    missing = [line.what for line in lines if line.words.startswith(NO_KERNEL)]
    assert missing == [
        "wrong bytes, loads by the page kernel",
        "wrong bytes, stores by the page kernel",
        "copies by the page kernel",
        "how the page kernel is best used",
    ]


def test_without_batched_copies_the_line_has_the_reason(emulator: Emulator) -> None:
    emulator.reset(delay_us=0, version=12040)
    lines = {line.what: line for line in copies.compared(OPTIONS)}
    assert lines["wrong bytes, in batches"].words.endswith("came with CUDA 12.8")
    assert lines["wrong bytes, one by one, pieces of 4,096 bytes"].verdict == "pass"


def test_the_page_kernel_is_compared_both_ways(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    verdicts = {line.what: line.verdict for line in copies.compared(OPTIONS)}
    assert emulator.calls("cuLaunchKernel") == 2 * 2
    for way in ("loads", "stores"):
        assert verdicts[f"wrong bytes, {way} by the page kernel, pieces of 33,808 bytes"] == "pass"
    assert emulator.faults == 0


def test_a_kernel_that_is_not_launched_does_not_count_as_copying(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, runs: object) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(install(monkeypatch), "enqueue", refuse)
    lines = {line.what: line for line in copies.compared(OPTIONS)}
    assert lines["wrong bytes, loads by the page kernel"].verdict == "fail"


def test_copies_that_the_driver_refuses_fail_one_path(emulator: Emulator) -> None:
    emulator.fail("cuMemcpyBatchAsync", 2)
    lines = {line.what: line for line in copies.compared(OPTIONS)}
    assert lines["wrong bytes, in batches"].words == "the driver has refused copies; the log has its error"
    assert lines["wrong bytes, in batches"].verdict == "fail"
    assert lines["wrong bytes, one by one, pieces of 4,096 bytes"].verdict == "pass"


def test_a_capture_is_tested_with_the_calls_of_the_workers_threads(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list(hazards.captures(OPTIONS))
    assert {line.words for line in lines} == {"0 0 0"}
    assert [line.verdict for line in lines] == ["pass", ""] + ["pass"] * 5 + ["", ""]
    monkeypatch.setattr(hazards, "RELAXED", 0)  # use the mode "global" instead of the relaxed mode
    harmed = [line for line in hazards.captures(OPTIONS) if line.words == "0 900 901"]
    assert [line.what.split(", ")[1] for line in harmed] == [
        f"{name} on a relaxed thread" for name in ("register", "unregister", "query")
    ]
    assert [line.verdict for line in harmed] == ["miss", "", "miss"]


@pytest.mark.slow
def test_the_depth_of_a_stream_is_found(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "_GATE_S", 4.0)  # must exceed the time of 1,200 calls by more than _WAITED_S
    monkeypatch.setattr(hazards, "_WAITED_S", 0.5)  # longer than scheduling delays on a busy machine
    emulator.set_depth(1200)
    for _ in range(3):  # on a busy machine, an earlier call may wait as long as the one on the full stream
        first, stood_still = hazards._depth(OPTIONS, "off", 1, "copies one by one")
        if first.words == "the call that made them 1,200":
            break
    assert first.words == "the call that made them 1,200"
    assert stood_still.target == "at most 500 ms"


@pytest.mark.slow
def test_calls_are_timed_alone_and_during_pinning(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latencies, "_SECONDS", 0.02)
    monkeypatch.setattr(latencies, "_PINNED_MIB", (0, 64))
    lines = {line.what: line for line in latencies.latencies(OPTIONS)}
    assert not [what for what, line in lines.items() if line.verdict == "fail" or "not asked" in line.words]
    longest = [line for what, line in lines.items() if "64 MiB are pinned, the longest of" in what]
    assert [line.target for line in longest] == ["at most 5 ms"] * 2
    assert emulator.registrations == 1  # only the rig's own memory was registered


@pytest.mark.slow
def test_exit_codes_come_from_processes_with_running_copies(emulator: Emulator) -> None:
    assert [(line.words, line.verdict) for line in hazards.exits(OPTIONS)] == [("0", "pass")] * 2


def test_a_process_that_crashes_at_exit_is_reported_as_a_miss(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed = subprocess.CompletedProcess[bytes]([], -11)
    monkeypatch.setattr("kvoffload.gpu_check.hazards.subprocess.run", lambda *_, **__: crashed)
    assert [(line.words, line.verdict) for line in hazards.exits(OPTIONS)] == [("-11", "miss")] * 2


def test_copies_across_an_expandable_segment_are_compared(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is a mock, because only a real GPU has expandable segments."""
    rig = Rig(OPTIONS)
    torch = MagicMock()
    torch.zeros.return_value.data_ptr.return_value = rig.memory
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert [line.verdict for line in hazards.segments(OPTIONS)] == ["pass", "pass"]
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_background_work_ends_with_its_measurement() -> None:
    with pytest.raises(ValueError, match="refused"), latencies.repeated(lambda: None):
        raise ValueError("refused")


# -- the profile ------------------------------------------------------------------------------------------------------


def write_profile(text: str, cuda: str = "13.0") -> Path:
    path = profile_path("emulated device 0", cuda)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_the_profile_is_written_and_an_engine_reads_it(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = install(monkeypatch)
    # Replace the measured speeds, which depend on the machine.
    monkeypatch.setattr(Rig, "speeds", lambda *_: [1.0])
    path = write_profile('{"stores": false}')
    lines = list(copies.profile(OPTIONS))
    assert lines[-1].words == str(path)
    assert path.name == "emulated-device-0-cuda-13-0.json"
    found = read_profile("emulated device 0", "13.0")
    assert found.programs == 4  # all settings are equally fast
    assert not found.stores  # the operator's setting from the earlier file is kept
    path.write_text('{"programs": 7, "fewest": 3}')
    monkeypatch.setattr(crossover.Trial, "limit", lambda *_: 4096)
    copier = made_copier(emulator, monkeypatch)
    assert copier.profile == GpuProfile(7, 3, stores=True)
    assert min(copier.kernel_below.values()) > 0
    assert kernel.programs[-2:] == [7, 7]
    path.write_text('{"stores": false}')
    assert made_copier(emulator, monkeypatch).kernel_below[Direction.STORE] == 0


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ('{"programs": 7}', "12.9"),
        *((bad, "13.0") for bad in ("", "{", '{"programs": 0}', '{"programs": "12"}', '{"grid": 12}', "[]")),
    ],
)
def test_a_bad_profile_and_one_of_another_driver_are_not_used_and_a_bad_one_logs_a_warning(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, text: str, cuda: str
) -> None:
    path = write_profile(text, cuda)
    with capture_logs() as logs:
        assert made_copier(emulator, monkeypatch).profile == GpuProfile()
    warnings = [(entry["event"], entry["path"]) for entry in logs if entry["log_level"] == "warning"]
    assert warnings == ([("gpu_profile_ignored", str(path))] if cuda == "13.0" else [])


def made_copier(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> CudaCopier:
    engine = Engine(emulator)
    monkeypatch.setattr(factory, "current_stream", lambda device: lambda: engine.stream)
    copier = factory.make_copier(engine.layout, threads=None, clock=None)  # type: ignore[arg-type]  # of the CPU's
    assert isinstance(copier, CudaCopier)
    assert isinstance(copier.driver, NvidiaDriver)
    return copier
