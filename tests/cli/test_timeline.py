from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.main import main
from kvoffload.telemetry.records import read_journal

DEMO = (
    "demo --model tiny --conversations 4 --turns 3 --first-tokens 100 --turn-tokens 30 --answer-tokens 5 "
    "--device-blocks 30 --host-bytes 1MiB"
)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "journal.jsonl"
    # Run in a separate process: the demo sets up logging, which would otherwise affect the whole module.
    command = [sys.executable, "-m", "kvoffload", *DEMO.split(), "--config", f"journal_path={path}"]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture
def trace(journal: Path, tmp_path: Path) -> list[dict[str, Any]]:
    target = tmp_path / "trace.json"
    assert main(["timeline", str(journal), "-o", str(target)]) == Exit.OK
    drawn: list[dict[str, Any]] = json.loads(target.read_text())["traceEvents"]
    return drawn


@pytest.mark.slow
def test_everything_that_happened_is_drawn_once(journal: Path, trace: list[dict[str, Any]]) -> None:
    reported = Counter(_name(record.message) for record in read_journal(journal))
    drawn = Counter(event["name"] for event in trace)
    spans = Counter(event["cat"] for event in trace if event["ph"] == "X")
    assert spans["steps"] == reported["StepScheduled"]
    assert drawn["lookup"] == reported["LookupAnswered"]
    assert drawn["copy"] == drawn["queued"] == reported["RankReported"]
    assert drawn["waits for load"] == reported["LoadScheduled"] > 0
    for name in ("HitPinned", "HitDropped", "BlocksEvicted", "CapacityGrown"):
        assert drawn[name] == reported[name]
    assert drawn["HitPinned"] > 0
    assert drawn["BlocksEvicted"] > 0


@pytest.mark.slow
def test_spans_of_one_line_nest(trace: list[dict[str, Any]]) -> None:
    """If spans on one line overlap without nesting, a viewer draws them wrongly and shows no error."""
    lines: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            span = (event["ts"], event["ts"] + event["dur"])
            lines.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in lines.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.01:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.01
            open_until.append(end)


@pytest.mark.slow
def test_the_trace_has_the_format_that_viewers_read(trace: list[dict[str, Any]]) -> None:
    named = {(event["pid"], event["tid"]) for event in trace if event["name"] == "thread_name"}
    for event in trace:
        assert event["ph"] in "XiMsf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
        assert event["ph"] == "M" or (event["pid"], event["tid"]) in named


@pytest.mark.slow
def test_the_trace_is_written_next_to_the_journal(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(journal)]) == Exit.OK
    assert f"{journal}.trace.json" in capsys.readouterr().err
    assert sorted(path.name for path in journal.parent.iterdir()) == [
        "journal.jsonl",
        "journal.jsonl.trace.json",
    ]


@pytest.mark.slow
def test_a_truncated_journal_is_read_up_to_the_cut(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.jsonl"
    cut.write_text(journal.read_text()[:-10])
    assert main(["timeline", str(cut), "-o", "-"]) == Exit.FAILED
    out, err = capsys.readouterr()
    assert len(json.loads(out)["traceEvents"]) > 50
    assert "the journal ends early" in err
    assert "cut off" in err


def test_a_missing_journal_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(tmp_path / "none")]) == Exit.USAGE
    assert "No such file" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_empty_journal_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal").touch()
    assert main(["timeline", str(tmp_path / "journal")]) == Exit.USAGE
    assert "is empty" in capsys.readouterr().err


def test_a_file_that_is_not_a_journal_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").write_text("hello\n")
    assert main(["timeline", str(tmp_path / "journal")]) == Exit.USAGE
    assert "line 1: not JSON" in capsys.readouterr().err


def test_the_journal_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "journal").write_text("hello\n")
    assert main(["timeline", str(tmp_path / "journal"), "-o", str(tmp_path / "journal")]) == Exit.USAGE
    assert "is the journal itself" in capsys.readouterr().err
    assert (tmp_path / "journal").read_text() == "hello\n"


def test_a_place_that_cannot_be_written_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"seq":1,"t":1.0,"event":"BlocksOffered","blocks":1}\n'
    (tmp_path / "journal").write_text(line)
    assert (
        main(["timeline", str(tmp_path / "journal"), "-o", str(tmp_path / "none" / "trace")]) == Exit.OUTPUT
    )
    assert "cannot be written" in capsys.readouterr().err


def _name(message: object) -> str:
    return str(getattr(message, "name", type(message).__name__))
