"""What goes to which stream."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from kvoffload.cli.demo.screen import Screen

if TYPE_CHECKING:
    import pytest


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_in_place_and_gone_when_something_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    screen = Screen()
    screen.progress("one")
    screen.progress("two")
    screen.say("done")
    assert stderr.getvalue() == "\r\x1b[Kone\r\x1b[Ktwo\r\x1b[Kkvoffload: done\n"


def test_a_result_takes_the_progress_away_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    screen = Screen()
    screen.progress("one")
    screen.result("table")
    assert stderr.getvalue().endswith("\r\x1b[K")
    assert capsys.readouterr().out == "table\n"


def test_quiet_shows_no_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr := Terminal())
    Screen(quiet=True).progress("one")
    assert stderr.getvalue() == ""


def test_no_terminal_shows_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen()
    screen.progress("one")
    screen.say("two")
    screen.detail("  three")
    assert capsys.readouterr() == ("", "kvoffload: two\n  three\n")
