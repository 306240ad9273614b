from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvoffload.cli.exits import Exit
from kvoffload.cli.journal_lines import Lines, add_journal_arguments, opened, parse_time
from kvoffload.cli.main import main
from kvoffload.telemetry.records import BEGUN, rotated

NOON = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC).timestamp()

BOTH = pytest.mark.parametrize("command", ["report", "timeline"])


def line(sequence: int, at: float, event: str, **fields: object) -> str:
    return json.dumps({"seq": sequence, "t": at, "event": event, **fields}) + "\n"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Return a journal in two files, with two requests ten seconds apart; each request has one load."""
    path = tmp_path / "journal"
    begun = line(0, NOON, BEGUN, kvoffload="0.1", engine={"name": "vllm", "version": "1", "model": "m"})
    rotated(path).write_text(begun + load_of("a", 1, 1, NOON))
    path.write_text(begun + load_of("b", 2, 4, NOON + 10))
    return path


def load_of(request: str, job: int, sequence: int, at: float) -> str:
    seen = line(sequence, at, "RequestSeen", request=request, prompt_tokens=9, keys=[3], reads_cache=True)
    load = {"job": job, "request": request, "blocks": 2, "tokens": 32, "slots": [0, 1]}
    report = {"rank": 0, "direction": "load", "outcome": "done"}
    copy = {"copied_bytes": 9, "queue_s": 0.0, "copy_s": 0.1}
    scheduled = line(sequence + 1, at + 1, "LoadScheduled", **load)
    return seen + scheduled + line(sequence + 2, at + 2, "RankReported", job=job, **report, **copy)


def read(path: Path, *options: str) -> list[tuple[int, float]]:
    parser = argparse.ArgumentParser()
    add_journal_arguments(parser, ".out")
    lines, _ = opened(parser.parse_args([str(path), *options]), ".out")
    return [(record.sequence, record.time - NOON) for record in lines]


def test_a_journal_is_read_with_the_file_before_it(journal: Path) -> None:
    lines = Lines(journal)
    assert [record.sequence for record in lines] == [1, 2, 3, 4, 5, 6]
    assert lines.provenance["kvoffload"] == "0.1"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--since", str(NOON + 2)], [2, 10, 11, 12]),
        (["--until", str(NOON + 10)], [0, 1, 2, 10]),
        (["--since", "2026-11-22T12:00:01+00:00", "--until", "2026-11-22T13:00:10+01:00"], [1, 2, 10]),
        (["--last", "1.5s"], [11, 12]),
        (["--since", "1", "--until", f"{datetime.fromtimestamp(NOON).astimezone():%H:%M:%S}"], [0]),
    ],
)
def test_lines_can_be_selected_by_time(journal: Path, options: list[str], expected: list[float]) -> None:
    assert [at for _, at in read(journal, *options)] == expected


def test_a_time_of_day_means_its_most_recent_occurrence() -> None:
    day = datetime(2026, 11, 22, 18, 0).astimezone()
    assert parse_time("14:03", day.timestamp()) == day.replace(hour=14, minute=3).timestamp()
    assert parse_time("14:03:07", day.timestamp()) == day.replace(hour=14, minute=3, second=7).timestamp()


@pytest.mark.parametrize("text", ["25:00", "yesterday", "2026-13-01", "-5", ""])
def test_a_text_that_is_not_a_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a time"):
        parse_time(text, NOON)


def test_selecting_one_request_reports_no_missing_events(journal: Path) -> None:
    assert read(journal, "--request", "b") == [(1, 10), (2, 11), (3, 12)]


@BOTH
def test_commands_name_the_selected_part_and_its_journal(
    command: str, journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert main([command, str(journal), "-o", str(target), "--request", "a"]) == Exit.OK
    assert capsys.readouterr().err == f"kvoffload: wrote 3 events over 2.0 s to {target}\n"
    text = target.read_text()
    if command == "report":
        assert "Only a part of the journal: request a." in text
        assert "kvoffload 0.1; vllm 1; model m" in text
    else:
        assert json.loads(text)["otherData"]["engine"]["name"] == "vllm"


@BOTH
@pytest.mark.parametrize(
    ("kept", "said"),
    [
        ([1, 2, 6, 7], "events are missing: 3, numbers 3 to 5;"),
        ([1, 3, 5, 7, 9], "events are missing: 4, numbers 2 to 2 and others;"),
    ],
)
def test_missing_events_are_reported_with_exit_code_1(
    command: str, kept: list[int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "journal"
    path.write_text("".join(line(number, NOON + number, "BlocksOffered", blocks=3) for number in kept))
    assert main([command, str(path)]) == Exit.FAILED
    wrote, missing = capsys.readouterr().err.splitlines()
    assert wrote.startswith(f"kvoffload: wrote {len(kept)} events over {kept[-1] - 1}.0 s to {path}.")
    assert said in missing


# -- files that cannot be read or written -----------------------------------------------------------------------------

OFFERED = line(1, 1.0, "BlocksOffered", blocks=3)


@BOTH
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "-", "--last", "1h"], "whose end --last and a time without a date must know first"),
        (["-o", "-", "--since", "12:00"], "give a date and time, or a file"),
        ([], "give -o FILE"),
    ],
)
def test_a_pipe_that_options_would_read_twice_or_write_beside_is_an_error(
    command: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert main([command, str(pipe), *options]) == Exit.USAGE
    assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [pipe]


@BOTH
@pytest.mark.parametrize("options", [[], ["--last", "1h"]])
@pytest.mark.parametrize("name", ["", "long" * 99])
def test_a_folder_or_a_name_that_cannot_be_looked_up_is_a_one_line_error(
    command: str, options: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, problem = tmp_path / name, "File name too long" if name else "Is a directory"
    for output in ("-", str(path)):
        said = f"{path} is the journal itself" if output != "-" and not name else f"{path}: {problem}"
        assert main([command, str(path), "-o", output, *options]) == Exit.USAGE
        assert capsys.readouterr() == ("", f"kvoffload: error: {said}\n")


@BOTH
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ("hello\n", "line 1: not JSON"),
        ("{}\n", "line 1"),
        (line(1, 1, "BlocksOffered", blocks=3, **{"\x1b[2J": 1}), "?[2J"),
    ],
)
def test_a_file_that_is_not_a_journal_is_a_one_line_error_without_escapes(
    command: str, text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal\x1b]0;title\x07"
    if text is not None:
        journal.write_text(text)
    before = list(tmp_path.iterdir())
    assert main([command, str(journal)]) == Exit.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert error.rstrip("\n").isprintable()
    assert list(tmp_path.iterdir()) == before


@BOTH
def test_a_truncated_journal_is_shown_up_to_the_cut(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, target = tmp_path / "journal", tmp_path / "out"
    journal.write_text(OFFERED + line(4, 2.0, "BlocksOffered", blocks=4) + OFFERED[:10])
    assert main([command, str(journal), "-o", str(target)]) == Exit.FAILED
    assert "the journal ends early" in capsys.readouterr().err
    text = target.read_text()
    if command == "report":
        assert "The journal ends early, at line 3" in text
        assert "Events are missing: 2, numbers " in text
        assert "<td>kvoffload_offered_blocks_total</td><td></td><td>7</td>" in text
    else:
        (dropped,) = [one for one in json.loads(text)["traceEvents"] if one["name"] == "lines dropped"]
        assert dropped["args"] == {"lines": 2}


def test_advice_from_a_truncated_journal_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (journal := tmp_path / "journal").write_text(
        OFFERED + line(5, 2.0, "BlocksOffered", blocks=4) + OFFERED[:10]
    )
    assert main(["advise", str(journal)]) == Exit.FAILED
    error = capsys.readouterr().err
    assert "the journal ends early" in error
    assert "events are missing" in error


@BOTH
@pytest.mark.parametrize(
    ("where", "code", "said"),
    [
        ("missing/out", Exit.OUTPUT, "cannot be written"),
        ("folder", Exit.OUTPUT, "cannot be written"),
        ("journal", Exit.USAGE, "is the journal itself"),
    ],
)
def test_output_that_cannot_be_written_is_reported_and_nothing_changes(
    command: str, where: str, code: Exit, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "journal"
    journal.write_text(OFFERED)
    (tmp_path / "folder").mkdir()
    assert main([command, str(journal), "-o", str(tmp_path / where)]) == code
    error = capsys.readouterr().err
    assert where in error
    assert said in error
    assert journal.read_text() == OFFERED
    assert {path.name for path in tmp_path.iterdir()} == {"journal", "folder"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--last", "1h", "--since", "12:00"], "give one of the two"),
        (["--last", "soon"], "is not a duration"),
        (["--since", "soon"], "argument --since: 'soon' is not a time"),
        (["--request", "nobody"], "has no lines in this part: request nobody"),
    ],
)
def test_a_selection_that_cannot_be_shown_is_wrong_usage(
    options: list[str], problem: str, journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(journal), *options]) == Exit.USAGE
    assert problem in capsys.readouterr().err
    assert not Path(f"{journal}.html").exists()
