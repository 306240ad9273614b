"""`kvoffload doctor` from end to end, in this process and in one of its own."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from kvoffload.checks.check import Answer, Finding, Verdict
from kvoffload.cli.doctor import adapters
from kvoffload.cli.doctor.output import as_text, worst
from kvoffload.cli.main import main

VERDICTS = {"go", "warning", "no-go", "not known"}


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and findings by check."""
    code = main(["doctor", "--json", *argv])
    reported = json.loads(capsys.readouterr().out)
    assert all(set(one) == {"check", "verdict", "finding", "remedy"} for one in reported["findings"])
    by_check = {one.pop("check"): one for one in reported["findings"]}
    assert {one["verdict"] for one in by_check.values()} <= VERDICTS
    return code, {"": reported["verdict"], **by_check}


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_every_check_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = doctor(capsys, "--config", '{"host_bytes": "1MiB"}')
    machine = {
        "machine memory",
        "cgroup memory",
        "locked memory",
        "swap",
        "expandable segments",
        "shared memory",
        "memory nodes",
    }
    vllm = {
        "vllm version",
        "vllm plugin",
        "vllm connector",
        "load failures",
        "prefix caching",
        "block hashes",
        "model sizes",
    }
    disk = {"disk space", "disk file system", "disk owners", "disk speed", "disk leftovers", "disk drain"}
    others = {
        "settings",
        "journal",
        "span collector",
        "remote store",
        "python",
        "packages",
        "gpu",
        "host pool",
        "copy speed",
        "reference plugin",
    }
    assert set(found) == {"", *machine, *vllm, *disk, *others}
    assert found["reference plugin"]["verdict"] == "go"
    assert found["vllm plugin"]["verdict"] == "go"
    not_given = (
        "vllm connector",
        "load failures",
        "prefix caching",
        "host pool",
        "copy speed",
    )
    for name in not_given:
        assert found[name]["verdict"] == "not known"


def test_lines_for_people_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", '{"host_bytse": 1, "verify": "no"}']
    code, found = doctor(capsys, *argv)
    assert main(["doctor", "--verbose", *argv]) == code == 1
    said = capsys.readouterr().out
    flat = " ".join(said.split())
    for name, one in found.items():
        if name:
            assert f"{one['verdict']} {name}: {one['finding']}" in flat or "available" in one["finding"]
    assert said.startswith("no-go: ")
    assert max(map(len, said.splitlines())) <= 80


def test_findings_are_shown_as_text() -> None:
    finding = Finding(Verdict.NO_GO, "a\x1b[2J\nb\udcff", "c\x07")
    assert as_text([Answer("x", finding)]).splitlines()[2:] == [
        "no-go     x: a?[2J b?",
        "          remedy: c?",
    ]


def test_problems_come_first_and_what_passed_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "host_bytse=1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("no-go     settings: unknown key 'host_bytse'; did you mean host_bytes?")
    assert not any(line.startswith("go ") for line in lines)
    assert lines[-1].endswith(" checks passed (--verbose lists them)")


def test_strict_wants_everything_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "host_bytes=1MiB"]) == 0
    assert capsys.readouterr().out.startswith("not known: ")
    assert main(["doctor", "--strict", "--config", "host_bytes=1MiB"]) == 1


def test_bad_settings_are_listed_all_at_once_and_nothing_is_guessed_from_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"host_bytse": 1, "transfer_timeout_s": "soon"}')
    code, found = doctor(capsys, "--config", str(path))
    assert (code, found[""], found["settings"]["verdict"]) == (1, "no-go", "no-go")
    assert "did you mean host_bytes?" in found["settings"]["finding"]
    assert "transfer_timeout_s" in found["settings"]["finding"]
    assert found["machine memory"]["verdict"] == "not known"


def test_more_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--config", '{"host_bytes": "1000TiB"}')
    assert (code, found["machine memory"]["verdict"]) == (1, "no-go")


def test_sizes_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "--ranks",
        "2",
        "--block-bytes",
        "1MiB",
        "--page-bytes",
        "4KiB",
        "--device-blocks",
        "2000",
        "--config",
    ]
    code, found = doctor(capsys, *argv, '{"host_bytes": "1GiB"}')
    assert code == 0
    assert found["host pool"]["verdict"] == "warning"
    assert "512 blocks on the host, 2,000 on the device" in found["host pool"]["finding"]
    assert "pages of 4.0 KiB" in found["copy speed"]["finding"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--config", "/nowhere"], "neither a JSON object nor a file"),
        (["--config", "nowhere"], "neither a JSON object nor a file"),
        (["--config", "{"], "not JSON"),
        (["--config", '{"a":' * 100_000], "not JSON"),
        (["--config", '{"a": ' + "9" * 5000 + "}"], "not JSON"),
        (["--config", "/dev/zero"], "not JSON"),
        (["--block-bytes", "5", "--page-bytes", "2"], "no multiple"),
        (["--config", "{}", "--kv-transfer-config", '{"kv_connector": "KVOffloadConnector"}'], "given twice"),
        (["--kv-transfer-config", "[]"], "neither a JSON object"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *argv)


@pytest.mark.parametrize("argv", [["--ranks", "0"], ["--block-bytes", "many"], ["--rank", "1"]])
def test_wrong_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *argv])
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_an_adapter_that_cannot_be_imported_is_a_no_go_and_harms_no_other_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = EntryPoint("lost", "a_module_that_is_not_there", adapters.ENTRY_POINT_GROUP)
    monkeypatch.setattr(adapters, "entry_points", lambda group: EntryPoints([lost]).select(group=group))
    code, found = doctor(capsys)
    assert (code, found["lost"]["verdict"]) == (1, "no-go")
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--help"])
    assert ended.value.code == 0


@pytest.mark.slow
def test_other_commands_do_not_pay_for_it() -> None:
    program = (
        "import sys; from kvoffload.cli.main import parsers; parsers(); "
        "print(sorted({'numpy', 'torch', 'vllm', 'structlog'} & set(sys.modules)))"
    )
    reported = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert reported.stdout.strip() == "[]"


def test_the_verdict_is_the_worst_of_all() -> None:
    def answers(*verdicts: Verdict) -> list[Answer]:
        return [Answer("one", Finding(verdict, "text")) for verdict in verdicts]

    assert worst(answers(Verdict.GO, Verdict.UNKNOWN)) is Verdict.UNKNOWN
    assert worst(answers(Verdict.WARNING, Verdict.UNKNOWN)) is Verdict.WARNING
    assert worst(answers(Verdict.NO_GO, Verdict.WARNING, Verdict.GO)) is Verdict.NO_GO
    assert as_text(answers(Verdict.WARNING, Verdict.GO)).splitlines()[0] == "warning: 1 warning, 1 go"


def in_process(*argv: str, before: Callable[[], object] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvoffload.cli", "doctor", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, preexec_fn=before)


@pytest.mark.slow
def test_in_a_process_of_its_own_with_little_locked_memory() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    reported = in_process("--json", "--config", '{"host_bytes": "1MiB"}', before=lower)
    (locked,) = [one for one in json.loads(reported.stdout)["findings"] if one["check"] == "locked memory"]
    # Without a GPU nothing is pinned; with one the limit is reported.
    assert "nothing is pinned" in locked["finding"] or "at most 64.0 KiB" in locked["finding"]
    assert (reported.returncode, reported.stderr) == (0, "")


@pytest.mark.slow
def test_in_a_process_of_its_own_without_heavy_imports() -> None:
    program = (
        "import sys; from kvoffload.cli.main import main; code = main(['doctor', '--config', '{\"no\": 1}']); "
        "print(code, sorted({'torch', 'vllm', 'prometheus_client'} & set(sys.modules)))"
    )
    reported = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert reported.stdout.splitlines()[-1] == "1 []"
