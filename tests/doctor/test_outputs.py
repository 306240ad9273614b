"""The journal's file and the collector of spans are tried as an engine's start tries them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvoffload.checks.outputs import CHECKS
from kvoffload.model.config import OffloadConfig
from kvoffload.telemetry.journal_file import JournalFile
from tests.doctor.trees import ask, machine, setup

JOURNAL, COLLECTOR = CHECKS


def of_journal(path: Path, tmp_path: Path) -> tuple[str, str]:
    return ask(JOURNAL, setup(config=OffloadConfig(journal_path=path)), machine(tmp_path / "machine"))


def test_a_journal_that_can_be_written_is_not_left_behind(tmp_path: Path) -> None:
    assert of_journal(tmp_path / "journal", tmp_path) == ("go", str(tmp_path / "journal"))
    assert not (tmp_path / "journal").exists()


def test_a_journal_that_is_there_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text("a line\n")
    path.chmod(0o640)
    assert of_journal(path, tmp_path)[0] == "go"
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("a line\n", 0o640)


def test_what_a_start_would_refuse_is_a_no_go(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    open_one = JournalFile(tmp_path / "open")
    try:
        for name, reason in (
            ("none/journal", "No such file"),
            ("link", "symbolic link"),
            ("open", "another process writes it"),
        ):
            verdict, text = of_journal(tmp_path / name, tmp_path)
            assert verdict == "no-go"
            assert reason in text
    finally:
        open_one.close()


def test_a_collector_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        known = setup(config=OffloadConfig(otlp_endpoint=f"http://127.0.0.1:{port}/v1/traces"))
        assert ask(COLLECTOR, known, machine(tmp_path)) == ("go", f"127.0.0.1:{port} answers")
    verdict, text = ask(COLLECTOR, known, machine(tmp_path))
    assert verdict == "warning"
    assert "nothing answers" in text


def test_spans_without_their_packages_are_a_no_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="opentelemetry")

    monkeypatch.setattr("kvoffload.telemetry.spans.import_module", missing)
    known = setup(config=OffloadConfig(otlp_endpoint="http://localhost:4318/v1/traces"))
    assert ask(COLLECTOR, known, machine(tmp_path))[0] == "no-go"


@pytest.mark.parametrize("check", CHECKS)
def test_without_usable_settings_nothing_is_known(check: object, tmp_path: Path) -> None:
    assert ask(check, setup(config=None), machine(tmp_path))[0] == "not known"  # type: ignore[arg-type]
