"""Options of commands that read a journal, and a reader of the lines that the options select."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit, say
from kvoffload.cli.partial_file import STDOUT

if TYPE_CHECKING:
    from kvoffload.telemetry.records import JournalError, Record, Selection

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")


def add_journal_arguments(parser: argparse.ArgumentParser, suffix: str) -> None:
    """Add the options that name the journal, the lines to read and the output file.

    Args:
        parser: the parser of a command.
        suffix: the default output file is the journal's path followed by this suffix.
    """
    add = parser.add_argument
    words = "the file that an engine wrote to `journal_path`; may be gzipped, JOURNAL.1 is read before it"
    add("journal", metavar="JOURNAL", type=Path, help=words)
    times = "a date and time (2026-11-22T14:03, local unless it has an offset), HH:MM[:SS] of the last day, or unix seconds"
    add("--since", metavar="TIME", type=_time, help=f"skip lines before this time: {times}")
    add("--until", metavar="TIME", type=_time, help="skip lines after this time")
    add("--last", metavar="DURATION", type=_duration, help="only the end of the journal: 90s, 10m, 2h, 1d")
    add("--request", metavar="ID", help="only lines of this request and of its loads")
    default = f"(default: JOURNAL{suffix})"
    add("-o", "--output", metavar="FILE", type=Path, help=f'where to; "-" for standard output {default}')


def opened(args: argparse.Namespace, suffix: str) -> tuple[Lines, Path]:
    """Return a reader of the lines that the options select, and the output file's path.

    Raises:
        CommandError: `--last` and `--since` are both given, the output would replace the journal, or the journal comes
            through a pipe and the options need a file.
        JournalError: the journal cannot be opened.
    """
    if args.last is not None and args.since is not None:
        raise CommandError("--last and --since both say where to begin; give one of the two")
    if args.output is None and _is_pipe(args.journal):
        raise CommandError(f"{args.journal} is no file, beside which the output could be: give -o FILE")
    output: Path = args.output or Path(f"{args.journal}{suffix}")
    with suppress(OSError):  # one of them is missing, or cannot be looked up
        if output.samefile(args.journal):
            raise CommandError(f"{output} is the journal itself")
    last = None if args.last is None else f"{args.last:g} s"
    asked = {"since": args.since, "until": args.until, "last": last, "request": args.request}
    words = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    return Lines(args.journal, _part(args), words), output


@dataclass(slots=True)
class Lines:
    """Reads a journal up to its first unreadable line. While an engine runs, the last line may be incomplete.

    Args:
        path: the journal's path.
        part: the lines to read; None for all lines.
        words: a description of `part` for messages; empty for all lines.
        count: the number of lines read so far.
        seconds: the seconds from the first line read to the last.
        gaps: the first and the last number of each range of missing lines.
        problem: the error in the first unreadable line; None if all lines were read.
        provenance: the provenance in the last header read; empty without a header.
    """

    path: Path
    part: Selection | None = None
    words: str = ""
    count: int = 0
    seconds: float = 0.0
    gaps: list[tuple[int, int]] = field(default_factory=list)
    problem: JournalError | None = None
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Record]:
        """Yield the selected lines up to the first unreadable line.

        Raises:
            KVOffloadError: no line can be read.
        """
        from kvoffload.telemetry.records import JournalError, read_journal

        begun, before = 0.0, 0
        try:
            for record in read_journal(self.path, self.part, self._begun):
                if not self.count:
                    begun = record.time
                elif record.sequence > before + 1:
                    self.gaps.append((before + 1, record.sequence - 1))
                before = record.sequence
                self.seconds = max(self.seconds, record.time - begun)
                self.count += 1
                yield record
        except JournalError as error:
            if not self.count:
                raise
            self.problem = error
        if not self.count:
            raise CommandError(
                f"{self.path} has no lines in this part: {self.words}"
                if self.words
                else f"{self.path} is empty"
            )

    @property
    def missing(self) -> str:
        """A message with the number of missing lines and the lines' numbers."""
        count, (first, last) = sum(last - first + 1 for first, last in self.gaps), self.gaps[0]
        shown = f"numbers {first} to {last}{' and others' if len(self.gaps) > 1 else ''}"
        return f"{count:,}, {shown}; the feed dropped them, or they were removed from the file"

    def report(self, output: Path) -> int:
        """Print how many events the output contains and which are missing, and return the command's exit code."""
        where = "standard output" if output == STDOUT else output
        events = "1 event" if self.count == 1 else f"{self.count:,} events"
        say(f"wrote {events} over {self.seconds:,.1f} s to {where}")
        return self.report_missing()

    def report_missing(self) -> int:
        """Print which part of the journal could not be read, and return the command's exit code."""
        if self.problem is not None:
            say(f"the journal ends early: {self.problem}")
        if self.gaps:
            say(f"events are missing: {self.missing}")
        return Exit.FAILED if self.problem or self.gaps else Exit.OK

    def _begun(self, provenance: Mapping[str, object]) -> None:
        self.provenance = provenance


def _part(args: argparse.Namespace) -> Selection:
    """Return the part of the journal that the options select. `--last` counts back from the journal's last line."""
    from kvoffload.telemetry.records import Selection, last_time

    last = 0.0
    if args.last is not None or any(_CLOCK.fullmatch(text) for text in (args.since, args.until) if text):
        if _is_pipe(args.journal):
            problem = f"{args.journal} is no file, whose end --last and a time without a date must know first"
            raise CommandError(f"{problem}: give a date and time, or a file")
        last = last_time(args.journal) or 0.0
    since = -math.inf if args.since is None else parse_time(args.since, last)
    until = math.inf if args.until is None else parse_time(args.until, last)
    return Selection(since if args.last is None else last - args.last, until, args.request)


def _is_pipe(path: Path) -> bool:
    """Return whether something can be read from `path` only once."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def parse_time(text: str, last: float) -> float:
    """Convert an option's value to unix seconds.

    Args:
        text: an ISO date and time, unix seconds, or a time of day.
        last: a time in unix seconds. If `text` is a time of day, it belongs to the same day.

    Raises:
        ArgumentTypeError: `text` is not a time.
    """
    try:
        if clock := _CLOCK.fullmatch(text):
            hour, minute, second = (int(part or 0) for part in clock.groups())
            day = datetime.fromtimestamp(last).astimezone()
            return day.replace(hour=hour, minute=minute, second=second, microsecond=0).timestamp()
        if re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError) as error:
        said = f"{text!r} is not a time; write 2026-11-22T14:03, 14:03 or unix seconds"
        raise argparse.ArgumentTypeError(said) from error


def _time(text: str) -> str:
    parse_time(text, 0.0)
    return text


def _duration(text: str) -> float:
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 90s, 10m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]
