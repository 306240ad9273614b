"""Asks children that answer, crash, print or hang."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvoffload.checks.ask import ask, is_about_the_hub, words_of
from tests.tooling.scripts import ROOT


def reply(tmp_path: Path, program: str, **request: object) -> dict[str, Any]:
    """Ask a child that runs `program`; `find` in it gets the request."""
    (tmp_path / "child.py").write_text(f"from kvoffload.checks.ask import answer\n{program}\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "plugins")]
    limit = 600.0 if "HANG" not in program else 1.0
    return ask("child", request, {**os.environ, "PYTHONPATH": ":".join(filter(None, paths))}, limit_s=limit)


def test_a_child_answers_whatever_it_prints(tmp_path: Path) -> None:
    program = "import os; answer(lambda one: (print('x'), os.system('echo y'), {'got': one})[2])"
    assert reply(tmp_path, program, words=["--a", "ü"]) == {"got": {"words": ["--a", "ü"]}}


def test_a_child_downloads_nothing(tmp_path: Path) -> None:
    found = reply(tmp_path, "import os; answer(lambda _: {'offline': os.environ.get('HF_HUB_OFFLINE')})")
    assert found == {"offline": "1"}


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise RuntimeError('no library\\nof this name')", "ends with code 1: of this name"),
        ("import os; os._exit(7)", "ends with code 7: it prints nothing"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ends with code -9"),
        ("print('not JSON')", "ends with code 0: it prints nothing"),
        ("answer(lambda _: 1)", "its answer is not an object"),
    ],
)
def test_a_child_that_does_not_answer_is_a_reason(tmp_path: Path, program: str, said: str) -> None:
    assert said in reply(tmp_path, program)["unknown"]


def test_a_child_that_hangs_is_killed_with_its_own_children(tmp_path: Path) -> None:
    """The grandchild holds the write end of a pipe; the read ends only when no process holds it."""
    os.mkfifo(fifo := tmp_path / "fifo")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    program = (
        "import os, signal, subprocess, sys  # HANG\n"
        f"subprocess.Popen(['sh', '-c', 'echo up > {fifo}; exec 3>{fifo}; kill -STOP $$'])\n"
        "signal.pause()"
    )
    assert "does not answer within 1 s" in reply(tmp_path, program)["unknown"]
    os.set_blocking(reader, True)
    with os.fdopen(reader) as file:
        assert file.read() in ("up\n", "")


def test_an_errors_words_are_one_short_line() -> None:
    class Many(ValueError):
        def errors(self) -> list[dict[str, Any]]:
            return [{"loc": ("role",), "msg": "Input\nis odd"}, {"loc": (), "msg": "Value error, no"}]

    assert words_of(Many()) == "role: Input is odd; no"
    assert words_of(KeyError()) == "KeyError"
    assert len(words_of(ValueError("x" * 9000))) < 700


def test_an_error_below_another_may_come_from_the_hub() -> None:
    hub = type("Offline", (Exception,), {"__module__": "huggingface_hub.errors"})
    outer = ValueError("no config")
    outer.__cause__ = hub("offline")
    assert is_about_the_hub(outer)
    assert not is_about_the_hub(ValueError("no config"))
