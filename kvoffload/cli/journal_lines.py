"""What the commands that show a journal share: which of its lines are read, and where the result goes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kvoffload.cli.exits import CommandError, Exit, printable, say
from kvoffload.cli.partial_file import STDOUT

if TYPE_CHECKING:
    from kvoffload.telemetry.journal_reader import JournalError, Reading, Record

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_WORTH_A_BAR = 4 << 20  # bytes, about a second


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a journal that was asked for.

    Args:
        since, until: times as typed.
        last_s: seconds before its last line.
        request: the one request whose lines are wanted.
    """

    since: str | None = None
    until: str | None = None
    last_s: float | None = None
    request: str | None = None

    def __str__(self) -> str:
        words = [
            f"since {self.since}" if self.since else "",
            f"until {self.until}" if self.until else "",
            f"the last {self.last_s:g} s" if self.last_s is not None else "",
            f"request {self.request}" if self.request else "",
        ]
        return ", ".join(word for word in words if word)


def add_journal_arguments(parser: argparse.ArgumentParser, suffix: str) -> None:
    """Add the journal, the options that choose a part of it, and where the result goes; `opened` reads them."""
    add = parser.add_argument
    add(
        "journal",
        metavar="JOURNAL",
        type=Path,
        help="the file that an engine wrote to `journal_path`; may be gzipped, JOURNAL.1 is read before it",
    )
    times = "a date and time (2026-11-22T14:03, local unless it has an offset), HH:MM[:SS] of the last day, or unix seconds"
    add("--since", metavar="TIME", help=f"skip lines before this time: {times}")
    add("--until", metavar="TIME", help="skip lines after this time")
    add("--last", metavar="DURATION", type=_duration, help="only the end of the journal: 90s, 10m, 2h, 1d")
    add("--request", metavar="ID", help="only lines of this request and of its loads")
    default = f"(default: JOURNAL{suffix})"
    add("-o", "--output", metavar="FILE", type=Path, help=f'where to; "-" for standard output {default}')


def opened(args: argparse.Namespace, suffix: str) -> tuple[Lines, Path]:
    """Return the lines that the options ask for, and where the result goes.

    Raises:
        CommandError: `--last` and `--since` are both given, or the result would replace the journal.
    """
    if args.last is not None and args.since is not None:
        raise CommandError("--last and --since both say where to begin; give one of the two")
    output: Path = args.output or Path(f"{args.journal}{suffix}")
    if output.exists() and args.journal.exists() and output.samefile(args.journal):
        raise CommandError(f"{output} is the journal itself")
    return Lines(args.journal, Part(args.since, args.until, args.last, args.request)), output


@dataclass(slots=True)
class Lines:
    """Reads a journal up to the first line that cannot be read: a running engine's last line may be cut off.

    Args:
        path: of the journal.
        part: what is wanted of it.
        count: lines that were read.
        problem: what ended the reading early; None where nothing did.
        provenance: the last one that was read; empty where the journal has none.
    """

    path: Path
    part: Part = field(default_factory=Part)
    count: int = 0
    problem: JournalError | None = None
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Record]:
        """Yield the lines.

        Raises:
            KVOffloadError: none can be read.
        """
        from kvoffload.telemetry.journal_reader import JournalError, files_of, read_journal

        size = sum(file.stat().st_size for file in files_of(self.path) if file.exists())
        try:
            with _progress(self.path, size) as advance:
                reading = replace(self._reading(), on_begun=self._begun, on_progress=advance)
                for record in self._chosen(read_journal(self.path, reading)):
                    self.count += 1
                    yield record
        except JournalError as error:
            if not self.count:
                raise
            self.problem = error
        if not self.count:
            asked = f" in this part: {self.part}" if str(self.part) else ""
            raise CommandError(f"{self.path} has no lines{asked}" if asked else f"{self.path} is empty")

    def report(self, output: Path) -> int:
        """Print how much of the journal is in the output, and return the command's exit code."""
        where = "standard output" if output == STDOUT else output
        lines = "1 line" if self.count == 1 else f"{self.count:,} lines"
        say(f"{lines} of {self.path} are in {where}")
        if self.problem is None:
            return Exit.OK
        say(f"it ends early: {self.problem}")
        return Exit.FAILED

    def _begun(self, provenance: Mapping[str, object]) -> None:
        self.provenance = provenance

    def _reading(self) -> Reading:
        """Return the times that are wanted; relative ones count from the journal's last line."""
        from kvoffload.telemetry.journal_reader import Reading, last_time

        part = self.part
        needs_last = part.last_s is not None or _CLOCK.fullmatch(part.since or part.until or "")
        last = (last_time(self.path) if needs_last else None) or 0.0
        reading = Reading()
        if part.last_s is not None:
            reading = replace(reading, since=last - part.last_s)
        if part.since is not None:
            reading = replace(reading, since=parse_time(part.since, last))
        return replace(reading, until=parse_time(part.until, last)) if part.until is not None else reading

    def _chosen(self, records: Iterator[Record]) -> Iterator[Record]:
        return records if self.part.request is None else _of_request(records, self.part.request)


def parse_time(text: str, last: float) -> float:
    """Return unix seconds; a time of day is one of the day of `last`.

    Raises:
        CommandError: it is not a time.
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
        raise CommandError(
            f"{text!r} is not a time; write 2026-11-22T14:03, 14:03 or unix seconds"
        ) from error


def _duration(text: str) -> float:
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 90s, 10m, 2h or 1d")
    return float(found[1]) * _UNITS[found[2]]


def _of_request(records: Iterator[Record], request: str) -> Iterator[Record]:
    """Yield a request's lines and those of its loads, renumbered: what lies between is not missing."""
    from kvoffload.telemetry.records import Summary

    jobs: set[object] = set()
    before = number = 0
    for record in records:
        if record.sequence <= before:  # another process wrote from here on
            number = 0
            jobs.clear()
        before = record.sequence
        message = record.message
        read = message.fields.get if isinstance(message, Summary) else _getter(message)
        if read("request") == request:
            if (job := read("job")) is not None:
                jobs.add(job)
        elif read("job") is None or read("job") not in jobs:
            continue
        number += 1
        yield replace(record, sequence=number)


def _getter(message: object) -> Callable[[str], object]:
    return lambda name: getattr(message, name, None)


@contextmanager
def _progress(path: Path, size: int) -> Iterator[Callable[[int], object]]:
    """Show how much was read, on a terminal and where it takes long."""
    if size < _WORTH_A_BAR or not sys.stderr.isatty():
        yield lambda read_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(printable(f"reading {path.name}"), total=size)
        yield lambda read_bytes: progress.update(task, completed=read_bytes)
