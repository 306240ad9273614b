"""Runs the commands on journals with arbitrary contents. A command must end with a page, a trace, or a
one-line error.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import COMMANDS, main
from kvoffload.model import facts
from kvoffload.model.errors import KVOffloadError
from kvoffload.telemetry.records import to_plain
from tests.telemetry.streams import any_event

FACTS = sorted(
    name for name, cls in vars(facts).items() if isinstance(cls, type) and cls.__module__ == facts.__name__
)
FIELDS = sorted({name for cls in vars(facts).values() for name in getattr(cls, "__struct_fields__", ())})
# Fields with these names could clash with names in the code that reads a journal.
ODD = ["start", "end", "what", "track", "name", "replay", "self"]
times = st.floats(-1e9, 1e9) | st.integers(-3, 3) | st.sampled_from([0, 1e10])
anything = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(-1e9, 1e9)
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2)
)
reported = st.fixed_dictionaries({"event": st.sampled_from(FACTS)}).flatmap(
    lambda one: st.dictionaries(st.sampled_from(FIELDS + ODD), anything, max_size=6).map(
        lambda more: {**more, **one}
    )
)
READERS = ("timeline", "report")
OUTPUTS = (*READERS, "report --json")


def run(output: str, lines: list[dict[str, Any]]) -> int:
    """Run a command on a journal, check that an output in JSON is valid, and return the command's exit code."""
    command, *as_json = output.split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal")
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        target = Path(folder, "out")
        chosen = {"since": None, "until": None, "last": None, "request": None}
        args = argparse.Namespace(journal=path, output=target, json=bool(as_json), **chosen)
        try:
            # Call the command as `main` does, but without parsing the arguments for each example.
            code = int(import_module(COMMANDS[command]).run(args))
        except KVOffloadError:
            return Exit.USAGE
        if output != "report":
            json.loads(target.read_text())
        return code


lines = st.tuples(any_event().map(to_plain) | reported, times, st.integers(-2, 9)).map(
    lambda one: {"seq": one[2], "t": one[1], **one[0]}
)


@pytest.mark.slow
@given(journal=st.lists(lines, min_size=1, max_size=8))
def test_property_events_and_facts_in_any_order_at_any_time(journal: list[dict[str, Any]]) -> None:
    for output in OUTPUTS:
        assert run(output, journal) in (Exit.OK, Exit.FAILED, Exit.USAGE)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal"
    path.write_text('{"seq":1,"t":1.0,"event":"TierClosed","tier":"disk"}\n')
    return path


@pytest.mark.parametrize(
    "line", ['"event":"OfLaterVersions","request":"a"', '"event":"BlocksOffered","blocks":3']
)
def test_a_trace_without_known_events_is_valid_and_an_error(
    line: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal.write_text(f'{{"seq":1,"t":1.0,{line}}}\n')
    assert main(["timeline", str(journal)]) == Exit.FAILED
    assert json.loads(Path(f"{journal}.trace.json").read_text())["traceEvents"] == []
    name = line.split('"')[3]
    assert f"draws none of these events, such as {name}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "mode"),
    [(["timeline"], 0o600), (["report"], 0o666), (["report", "--request", "a"], 0o600)],
)
def test_what_names_requests_is_readable_only_by_its_owner(
    command: list[str], mode: int, journal: Path
) -> None:
    with journal.open("a") as file:
        file.write('{"seq":2,"t":1.0,"event":"FirstTokenReached","request":"a","found":null,"seconds":0.5}\n')
    output = journal.parent / "output"
    before = os.umask(0)
    try:
        assert main([*command, str(journal), "-o", str(output)]) == Exit.OK
    finally:
        os.umask(before)
    assert stat.S_IMODE(output.stat().st_mode) == mode


@pytest.mark.parametrize("command", READERS)
def test_a_link_is_replaced_and_its_target_unchanged(command: str, journal: Path) -> None:
    precious, link = journal.parent / "precious", journal.parent / "link"
    precious.write_text("precious")
    link.symlink_to(precious)
    for name in ("link.partial", "journal.partial"):
        (journal.parent / name).symlink_to(precious)
    assert main([command, str(journal), "-o", str(link)]) == Exit.OK
    assert precious.read_text() == "precious"
    assert link.is_file()
    assert not link.is_symlink()


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_path_that_is_not_a_regular_file_is_never_replaced(
    command: str, kind: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = journal.parent / kind
    os.mkfifo(target) if kind == "pipe" else target.mkdir()
    before = stat.S_IFMT(target.stat().st_mode)
    assert main([command, str(journal), "-o", str(target)]) == Exit.OUTPUT
    assert f"{target} cannot be written: it is" in capsys.readouterr().err
    assert stat.S_IFMT(target.stat().st_mode) == before
    assert {path.name for path in journal.parent.iterdir()} == {"journal", kind}
