from __future__ import annotations

import json
import resource
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from kvoffload.checks.check import FAILING, Finding, Verdict
from kvoffload.cli import doctor as command
from kvoffload.cli.doctor import as_text, worst
from kvoffload.cli.main import main

SIZED = {"host memory", "locked memory", "host pool"}
MACHINE = {"swap", "huge pages", "gpu"}
VLLM = {"vllm version", "vllm plugin", "vllm connector", "load failures", "model sizes"}
ON_SOCKETS = {"memory node"}  # this check runs only if a GPU's NUMA node is known
BLOCKS = ("--block-bytes", "1MiB", "--device-blocks", "2000")
ENOUGH = ("--config", "host_bytes=1MiB")


def doctor(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Run the doctor; return its exit code and its findings by check."""
    code = main(["doctor", "--json", *argv])
    reported = json.loads(capsys.readouterr().out)
    assert all(set(one) == {"check", "verdict", "finding", "remedy"} for one in reported["findings"])
    by_check = {one.pop("check"): one for one in reported["findings"]}
    assert {one["verdict"] for one in by_check.values()} <= set(Verdict)
    return code, {"": reported["verdict"], **by_check}


def test_every_check_prints_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _, found = doctor(capsys, "--config", '{"host_bytes": "1MiB"}')
    assert set(found) - ON_SOCKETS == {"", "settings", *SIZED, *MACHINE, *VLLM}
    assert found["vllm plugin"]["verdict"] == "ok"
    for name in ("vllm connector", "load failures", "host pool", "model sizes"):
        assert found[name]["verdict"] == "unknown"


def test_the_text_output_has_the_same_findings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--config", '{"host_bytse": 1, "verify": "no"}']
    code, found = doctor(capsys, *argv)
    assert main(["doctor", "--verbose", *argv]) == code == 1
    said = capsys.readouterr().out
    flat = " ".join(said.split())
    for name, one in found.items():
        if name:
            assert f"{one['verdict']} {name}: {one['finding']}" in flat
    assert said.startswith("error: ")


def test_findings_are_shown_as_text() -> None:
    finding = Finding(Verdict.ERROR, "a\x1b[2J\nb\udcff", "c\x07", "x")
    assert as_text([finding]).splitlines()[2:] == ["error    x: a?[2J b?", "         remedy: c?"]


def test_problems_come_first_then_missing_settings_and_a_count_of_passed_checks() -> None:
    def answer(check: str, verdict: Verdict, remedy: str = "", text: str = "text") -> Finding:
        return Finding(verdict, text, remedy, check)

    answers = [
        answer("one", Verdict.UNKNOWN, "give --a"),
        answer("two", Verdict.OK),
        answer("three", Verdict.WARNING, "do"),
        answer("four", Verdict.UNKNOWN),
        answer("five", Verdict.UNKNOWN, "give --a"),
        answer("six", Verdict.ERROR, "do"),
        answer("seven", Verdict.UNKNOWN, "give --a", "no device is here"),
    ]
    lines = as_text(answers).splitlines()
    assert lines == [
        "error: 1 error, 1 warning, 4 need more input, 1 passed",
        "",
        "error    six: text",
        "         remedy: do",
        "warning  three: text",
        "         remedy: do",
        "unknown  one, five (text), seven (no device is here): give --a",
        "unknown  four (text)",
        "",
        "1 check passed (--verbose lists them)",
    ]
    assert "unknown  one: text" in as_text(answers, strict=True)
    harmless = [one for one in answers if one.verdict not in FAILING]
    assert as_text(harmless).splitlines()[0] == "no problem found: of 5 checks, 4 need more input, 1 passed"
    assert as_text(harmless[:1], strict=True).startswith("unknown: 1 needs more input, 0 passed")
    assert as_text(harmless[1:2]).startswith("no problem found: of 1 check, 1 passed")
    assert as_text([answers[5], answers[5]]).startswith("error: 2 errors, 0 passed")
    assert worst(answers) is Verdict.ERROR
    assert worst(answers[:3]) is Verdict.WARNING
    assert worst(answers[:2]) is Verdict.UNKNOWN


LONG = Finding(Verdict.WARNING, "word " * 30, f"/a/path{'/that/is/long' * 8} stays whole", "host pool")


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_lines_are_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    *lines, path, stays = as_text([LONG]).splitlines()
    assert columns - 5 < max(map(len, lines)) <= columns
    assert (path.strip(), stays.strip()) == (LONG.remedy.split()[0], "stays whole")


@pytest.mark.parametrize(
    ("is_terminal", "no_colour", "word"),
    [(True, "", "\x1b[33mwarning\x1b[0m"), (True, "1", "warning"), (False, "", "warning")],
)
def test_the_verdict_has_a_colour_on_a_terminal(
    is_terminal: bool, no_colour: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setenv("NO_COLOR", no_colour)
    first, _, paragraph, *_ = as_text([LONG]).splitlines()
    assert first == f"{word}: 1 warning, 0 passed"
    assert paragraph.startswith(f"{word}  host pool: word")


def test_strict_fails_if_a_check_could_not_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", "host_bytes=1MiB"]) == 0
    assert "unknown  " in capsys.readouterr().out
    assert main(["doctor", "--strict", "--config", "host_bytes=1MiB"]) == 1


def test_bad_settings_are_listed_together_and_the_checks_use_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = {
        "host_bytse": 1,
        "transfer_timeout_s": "soon",
        "disk_path": f"{tmp_path}/disk",
        "disk_bytes": "1MiB",
    }
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(bad))
    code, found = doctor(capsys, "--config", str(path))
    tiers = {"disk space", "disk folder"}
    assert (code, set(found) - ON_SOCKETS) == (1, {"", "settings", *SIZED, *MACHINE, *VLLM, *tiers})
    assert "did you mean host_bytes?" in found["settings"]["finding"]
    assert "transfer_timeout_s" in found["settings"]["finding"]
    assert found["disk space"]["finding"].startswith("1.0 MiB fit ")
    assert {found[name]["verdict"] for name in SIZED} == {"unknown"}


@pytest.mark.parametrize("bad", ["verify=no", "tier_key_file=/nowhere/key", "remote_url=http://x", "block=1"])
def test_a_bad_setting_costs_no_other_check(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, "--config", bad, "--config", "host_bytes=1000TiB")
    assert (code, found["settings"]["verdict"]) == (1, "error")
    assert found["host memory"]["finding"].startswith("1,000.0 TiB are too much")
    assert set(found) >= {*SIZED, *MACHINE, *VLLM}


def test_without_settings_it_reports_the_machine_and_advises_settings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, found = doctor(capsys, "--block-bytes", "1MiB", "--device-blocks", "10", "-tp", "2")
    assert (code, found["settings"]["verdict"]) == (1, "error")
    assert "GiB left for 2 ranks; advised: 60.0 MiB, 3.0 times" in found["settings"]["finding"]
    _, found = doctor(capsys, "--block-bytes", "1TiB", "--device-blocks", "10", "--config", "disk_path=/d")
    assert "cache, with store_policy lazy; at most" in found["settings"]["finding"]


def test_without_host_bytes_the_machine_is_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A user's first call has no options."""
    code, found = doctor(capsys)
    assert (code, set(found) - ON_SOCKETS) == (1, {"", "settings", *SIZED, *MACHINE, *VLLM})
    assert "at least three times" in found["settings"]["finding"]
    assert found["settings"]["remedy"].startswith("give --config host_bytes=SIZE")
    assert {found[name]["verdict"] for name in SIZED} == {"unknown"}
    assert all(found[name]["verdict"] != "unknown" for name in MACHINE)
    for settings in (f'{{"journal_path": "{tmp_path}/none/x"}}', '{"host_bytes": "lots"}'):
        code, found = doctor(capsys, "--config", settings)
        assert (code, found["settings"]["verdict"]) == (1, "error")
        assert "host_bytes" in found["settings"]["finding"]
        assert set(found) >= MACHINE


def test_a_key_file_that_the_engine_would_refuse_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, found = doctor(capsys, *ENOUGH, "--config", f"tier_key_file={tmp_path / 'key'}")
    assert (code, found["settings"]["verdict"]) == (1, "error")
    assert found["settings"]["finding"].startswith(f"tier_key_file: {tmp_path / 'key'} is not used")


@pytest.mark.parametrize(
    ("argv", "check", "code", "verdict", "text"),
    [
        (["--config", "cpu_bytes_to_use_per_rank=1MiB", "-tp", "3"], "host memory", 0, "ok", "3.0 MiB "),
        (["--config", '{"host_bytes": "1000TiB"}'], "host memory", 1, "error", "1,000.0 TiB "),
        (["-tp", "2", *BLOCKS, "--config", "host_bytes=1GiB"], "model sizes", 0, "ok", ""),
        (
            ["-tp", "2", *BLOCKS, "--config", "host_bytes=1GiB"],
            "host pool",
            0,
            "warning",
            "512 blocks on the host, 2,000 on the device",
        ),
    ],
)
def test_host_memory_is_compared_with_ranks_machine_and_blocks(
    argv: list[str], check: str, code: int, verdict: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, found = doctor(capsys, *argv)
    assert (ended, found[check]["verdict"]) == (code, verdict)
    assert text in found[check]["finding"]


def test_the_kv_cache_of_the_line_is_compared_by_bytes_if_the_model_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ("--", "--model", "org/model", "-tp", "2", "--kv-cache-memory-bytes", "50G")
    code, found = doctor(capsys, *ENOUGH, *line, "--kv-transfer-config.kv_connector", "Other")
    assert (code, found["host pool"]["verdict"]) == (1, "warning")
    assert "at least three times the device's 100.0 GiB" in found["host pool"]["remedy"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--config", "/nowhere"], "neither a JSON object nor a file"),
        (["--config", "nowhere"], "neither a JSON object nor a file"),
        (["--config", "{"], "not JSON"),
        (["--config", '{"a":' * 100_000], "not JSON"),
        (["--config", '{"a": ' + "9" * 5000 + "}"], "not JSON"),
        (["--config", "/dev/zero"], "not JSON"),
        (["--config", "{}", "--kv-transfer-config", '{"kv_connector": "KVOffloadConnector"}'], "given twice"),
        (["--kv-transfer-config", "[]"], "neither a JSON object"),
        (["--device-blocks", "0"], "'0' is not a whole number of at least 1"),
        (["--block-bytes", "many"], "'many' is not a size such as 80GiB"),
        (["--rank", "1"], "unknown option --rank"),
    ],
)
def test_options_that_cannot_be_read_are_a_one_line_error(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *argv]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_an_adapter_that_cannot_be_imported_fails_the_doctor_and_no_other_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = EntryPoint("lost", "a_module_that_is_not_there", command.ENTRY_POINT_GROUP)
    monkeypatch.setattr(command, "entry_points", lambda group: EntryPoints([lost]).select(group=group))
    code, found = doctor(capsys, *ENOUGH)
    assert (code, found["lost"]["verdict"]) == (1, "error")
    assert main(["demo", "--help"]) == 0


@pytest.mark.slow
def test_a_low_limit_on_locked_memory_is_reported() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    argv = [sys.executable, "-m", "kvoffload", "doctor", "--json", "--config", '{"host_bytes": "1MiB"}']
    reported = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30, preexec_fn=lower)
    (locked,) = [one for one in json.loads(reported.stdout)["findings"] if one["check"] == "locked memory"]
    # Without a GPU, the doctor finds that nothing is pinned. With a GPU, it reports the limit.
    assert "nothing is pinned" in locked["finding"] or "at most 64.0 KiB" in locked["finding"]
    assert (reported.returncode, reported.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "heavy"),
    [
        ("make_parser()", {"numpy", "torch", "vllm", "structlog"}),
        ("main(['doctor', '--json'])", {"torch", "vllm", "prometheus_client"}),
    ],
)
def test_nothing_heavy_is_imported(call: str, heavy: set[str]) -> None:
    program = (
        f"import sys; from kvoffload.cli.main import main, make_parser; {call}; "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    argv = [sys.executable, "-c", program]
    reported = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
    assert reported.stdout.splitlines()[-1] == "[]"
