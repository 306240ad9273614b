"""`kvoffload doctor --engine sglang`. Only the last test needs SGLang."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvoffload.checks.check import run_checks
from kvoffload.cli.main import main
from kvoffload_sglang import doctor
from kvoffload_sglang.settings import BACKEND, OPTION
from tests.doctor.trees import machine, setup

OURS = {"settings", "disk space", "disk folder", "sglang version", "sglang options"}


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Run the doctor; return its exit code and its findings by check."""
    code = main(["doctor", "--engine", "sglang", "--json", *argv])
    return code, {one.pop("check"): one for one in json.loads(capsys.readouterr().out)["findings"]}


def launch(disk: Path, *options: str, **extra: object) -> list[str]:
    given = {**BACKEND, "disk_path": str(disk), "disk_bytes": "1MiB", **extra}
    start = ["python", "-m", "sglang.launch_server", "--model-path", "M", "--tp", "2"]
    chosen = ["--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic"]
    return ["--", *start, *chosen, OPTION, json.dumps(given), *options]


def test_only_the_tiers_are_checked_and_no_host_memory_is_demanded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, checks = found(capsys, "--config", f"disk_path={tmp_path}", "--config", "disk_bytes=1MiB")
    assert (code, set(checks)) == (0, OURS)
    assert checks["disk space"]["finding"].startswith("1.0 MiB fit")
    assert checks["sglang options"]["verdict"] == "unknown"
    _, checks = found(capsys, *launch(tmp_path, "--dp-size", "3"))
    assert checks["disk space"]["finding"].startswith("3.0 MiB")


@pytest.mark.parametrize(
    ("argv", "verdict", "text"),
    [
        (["--model-path", "M"], "error", "no --enable-hierarchical-cache"),
        (["--enable-hicache"], "warning", "it must be attached over HTTP later"),
    ],
)
def test_a_command_line_without_a_backend_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], verdict: str, text: str
) -> None:
    disk = ("--config", f"disk_path={tmp_path}", "--config", "disk_bytes=1MiB")
    reported = found(capsys, *disk, "--", *argv)[1]["sglang options"]
    assert (reported["verdict"], text in reported["finding"]) == (verdict, True), reported


def test_settings_that_a_start_refuses_are_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, checks = found(capsys, *launch(tmp_path, host_bytes="1GiB"))
    assert (code, checks["settings"]["verdict"]) == (1, "error")
    assert "host_bytes does not concern" in checks["settings"]["finding"]
    assert "neither disk_path nor remote_url" in found(capsys)[1]["settings"]["finding"]


@pytest.mark.parametrize(
    ("options", "extra", "verdict", "text"),
    [
        ([], {}, "ok", "works with them"),
        (["--hicache-storage-backend", "file"], {}, "error", "is file, not dynamic"),
        ([], {"class_name": "X"}, "error", "class_name in --hicache-storage-backend-extra-config is 'X'"),
        ([], {"backend_name": None}, "error", "has no backend_name"),
        (["--enable-lora", "--disable-radix-cache"], {}, "error", "excludes HiCache; LoRA is on"),
        (["--load-format", "dummy"], {}, "error", "cannot be identified without weights_id"),
        (["--load-format", "dummy"], {"weights_id": "v1"}, "ok", "works with them"),
    ],
)
def test_each_problem_of_a_command_line_is_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, options: list[str], extra: dict[str, object],
    verdict: str, text: str,
) -> None:  # fmt: skip
    reported = found(capsys, *launch(tmp_path, *options, **extra))[1]["sglang options"]
    assert (reported["verdict"], text in reported["finding"]) == (verdict, True), reported


@pytest.mark.parametrize(
    ("version", "verdict"), [(None, "unknown"), ("0.5.23", "ok"), ("0.5.24", "warning"), ("0.4.9", "warning")]
)
def test_sglangs_version_is_checked(tmp_path: Path, version: str | None, verdict: str) -> None:
    def find(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    with machine(tmp_path, version=find):
        (reported,) = run_checks([doctor.VERSION], setup())
    assert reported.verdict == verdict


@pytest.mark.sglang
@pytest.mark.filterwarnings("ignore")
def test_the_options_that_the_doctor_reads_are_those_of_sglang() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    own = {name for action in doctor.make_parser()._actions for name in action.option_strings}
    assert own <= set(parser._option_string_actions)
