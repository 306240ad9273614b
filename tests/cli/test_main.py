from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvoffload
from kvoffload.cli import main as command
from kvoffload.cli import signals
from kvoffload.cli.exits import CommandError, Exit
from kvoffload.cli.main import main, make_parser
from tests.cli.conftest import error_of
from tests.tooling.scripts import ROOT


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"kvoffload {kvoffload.__version__}\n"


def test_help_and_documents_name_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == Exit.OK
    names, codes = capsys.readouterr().out.split("Exit codes:")
    assert all(name in names for name in command.COMMANDS)
    assert {int(word) for word in codes.split() if word.isdigit()} == set(Exit)
    table = (ROOT / "docs/commands.md").read_text(encoding="utf-8").split("## Exit codes")[1]
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", table, flags=re.MULTILINE)} == set(Exit)


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(found.choices)


def options_with_types() -> list[tuple[str, str]]:
    """Return each command and option that accepts only certain values."""
    return [
        (command, action.option_strings[0])
        for command, parser in commands().items()
        for action in parser._actions
        if action.option_strings and (action.type not in (None, Path) or action.choices is not None)
    ]


@pytest.mark.parametrize(("command", "option"), options_with_types())
def test_the_error_for_a_bad_value_says_which_values_are_allowed(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = error_of(capsys, command, option, "!bad")
    reason = said.removeprefix(f"kvoffload: error: argument {option}").partition(" (see kvoffload")[0]
    # A URL is not repeated in the error, because it may contain credentials.
    assert "'!bad'" in reason or option == "--remote"
    assert any(word in reason for word in ("is not a", "is not HOST:PORT", "choose from", "it must be"))
    assert "_" not in reason
    assert "invalid" not in reason


@pytest.mark.parametrize("command", commands())
def test_help_has_each_default_once_and_fits_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == Exit.OK
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "docs/" not in text  # no wheel holds them
    formatter = commands()[command]._get_formatter()
    for action in commands()[command]._actions:
        assert not action.help or formatter._expand_help(action).count("default") <= 1


def test_a_missing_command_is_an_error_that_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == Exit.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert "Exit codes:" in err


@pytest.mark.parametrize("words", [[], ["doctor"]])
def test_help_is_also_a_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == Exit.OK
    wanted = capsys.readouterr().out
    assert main(["help", *words]) == Exit.OK
    assert capsys.readouterr().out == wanted


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            "dmeo",
            "argument COMMAND: 'dmeo' is not a choice; did you mean demo? (choose from advise, completion, ",
        ),
        ("frobnicate", "'frobnicate' is not a choice (choose from "),
        ("help doctr", "did you mean doctor?"),
        ("doctor --engine vlm", "argument --engine: 'vlm' is not a choice; did you mean vllm?"),
        ("report x --last -5m", "argument --last: '-5m' is not a duration"),
        ("top --interval 1e10 1", "'1e10' is not a number of seconds from 0 to 1,000,000,000"),
        ("top --interval 0 1", "argument --interval: '0' is not a number of seconds of at least 0.1"),
        ("demo --devcie=x", "unknown option --devcie; did you mean --device?"),
        ("demo --frobnicate", "unknown option --frobnicate (see"),
        ("demo --conv 3", "unknown option --conv; did you mean --config?; unexpected argument '3' (see"),
    ],
)
def test_an_unknown_word_is_an_error_that_names_only_similar_options(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(capsys, *argv.split())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--turns", "0"),
        ("--turns", "many"),
        ("--serve-for", "-1"),
        ("--serve-for", "nan"),
        ("--serve-metrics", "host"),
        ("--serve-metrics", "127.0.0.1:70000"),
        ("--serve-metrics", "::1:9464"),
        ("--layers", "sometimes"),
        ("--model", "huge"),
    ],
)
def test_bad_values(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    error = error_of(capsys, "demo", option, value)
    assert option in error
    assert value in error


@pytest.mark.parametrize(
    ("where", "error", "code", "said"),
    [
        ("demo.command.run", CommandError("no such thing"), Exit.USAGE, "error: no such thing"),
        ("demo.command.run", KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted"),
        ("signals.handle", KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted"),  # before there are handlers
    ],
)
def test_an_exception_in_a_command_is_printed_as_one_line(
    where: str,
    error: BaseException,
    code: Exit,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*_: object) -> int:
        raise error

    monkeypatch.setattr(f"kvoffload.cli.{where}", run)
    assert main(["demo"]) == code
    assert capsys.readouterr() == ("", f"kvoffload: {said}\n")


BLOCKED = """
import importlib, os, signal, sys, threading
from kvoffload.cli import main

def run(args):
    try:
        print("runs", flush=True)
        threading.Event().wait()
    finally:
        print("cleaned up", flush=True)

importlib.import_module(main.COMMANDS[sys.argv[1]]).run = run
sys.exit(main.main())
"""
ARGUMENTS = {
    "advise": ["9464"],
    "completion": ["bash"],
    "dashboards": ["export", "folder"],
    "report": ["journal"],
    "timeline": ["journal"],
    "top": ["url"],
}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_knows_the_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["completion", shell]) == Exit.OK
    script = capsys.readouterr().out
    assert [name for name in command.COMMANDS if name not in script] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", command.COMMANDS)
def test_sigterm_ends_every_command_cleanly_even_if_sigint_is_ignored(name: str) -> None:
    argv = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", sys.executable, "-c", BLOCKED, name]
    argv += ARGUMENTS.get(name, [])
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, text=True, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "runs\n"
        process.terminate()
        assert process.communicate(timeout=30) == ("cleaned up\n", "")
    finally:
        process.kill()
    assert process.returncode == Exit.TERMINATED


IMPORTS = """
import sys
from types import SimpleNamespace
from kvoffload.cli import main

def run(args):
    import imported
    while True:
        pass

sys.path.append(sys.argv.pop())
main.load = lambda _: SimpleNamespace(run=run, HELP="", add_arguments=id)
sys.exit(main.main(["demo"]))
"""


@pytest.mark.parametrize(
    "module",
    [
        "class Owned:\n    def __set_name__(self, *_): end()\nclass Owner:\n    owned = Owned()",
        "import weakref\nclass Owned: ...\nowned = Owned()\nend = weakref.ref(owned, end)\ndel owned",
    ],
)
def test_a_signal_in_an_import_ends_the_command_after_the_import(tmp_path: Path, module: str) -> None:
    end = "import signal\ndef end(*_): signal.raise_signal(signal.SIGTERM)\n"
    (tmp_path / "imported.py").write_text(f"{end}{module}\nprint('imported', flush=True)")
    argv = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("imported\n", "", Exit.TERMINATED)


def test_a_signal_during_the_start_of_the_event_loop_cancels_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, cancelled = asyncio.new_event_loop, []

    def start() -> asyncio.AbstractEventLoop:
        signal.raise_signal(signal.SIGTERM)
        return make()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    monkeypatch.setattr("asyncio.events.new_event_loop", start)
    signals.handle()
    with pytest.raises(KeyboardInterrupt):
        signals.run_async(work())
    assert cancelled == [True]
    assert signals.exit_code() == Exit.TERMINATED


def test_a_signal_after_the_end_of_the_command_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == Exit.OK
    signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == ""


def test_a_closed_pipe_causes_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    stdout = os.fdopen(write, "w")
    monkeypatch.setattr(sys, "stdout", stdout)

    def run(_: object) -> int:
        stdout.write("x" * 100_000)
        return 0

    monkeypatch.setattr(command, "load", lambda _: SimpleNamespace(run=run, HELP="", add_arguments=id))
    assert main(["demo"]) == Exit.OUTPUT
    assert capsys.readouterr().err == ""
    stdout.close()
