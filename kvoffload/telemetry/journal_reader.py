"""Reads a journal's files: plain or gzip, with the file that was rotated away before it."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from kvoffload.model.errors import KVOffloadError
from kvoffload.model.events import Event
from kvoffload.telemetry.journal_file import rotated
from kvoffload.telemetry.records import Summary, from_plain

BEGUN = "JournalBegun"
"""The name of each file's first line, which holds the provenance."""

_LONGEST_LINE = 1 << 24  # characters; a line of all slots of a large host has some hundred thousand
_END_OF_TIME = 1e11  # seconds: the year 5138
_TAIL_BYTES = 1 << 20
_START = re.compile(r'\{"seq": ?\d+, ?"t": ?(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?), ?"event": ?"(\w+)"')
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"

OnBegun = Callable[[Mapping[str, object]], object]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a journal's file.

    Args:
        sequence: its number; a gap means that lines were dropped.
        time: unix seconds by the writer's clock.
        message: an event, or the summary of a fact.
    """

    sequence: int
    time: float
    message: Event | Summary


class JournalError(KVOffloadError):
    """Raised when a journal's file cannot be read.

    Args:
        path: of the file.
        line: the first bad line; 0 if the whole file cannot be read.
        problem: in words.
    """

    def __init__(self, path: Path, line: int, problem: str) -> None:
        self.path, self.line, self.problem = path, line, problem
        super().__init__(f"{path}, line {line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Part:
    """The lines to read; by default all.

    Args:
        since, until: unix seconds; lines before and after are skipped, mostly unparsed.
        request: read only lines of this request and of its loads.
    """

    since: float = -math.inf
    until: float = math.inf
    request: str | None = None


def read_journal(
    path: Path, part: Part | None = None, on_begun: OnBegun = lambda provenance: None
) -> Iterator[Record]:
    """Yield the lines of a journal's files, oldest first.

    Args:
        path: the journal; the file that was rotated away is read before it.
        part: the lines to read.
        on_begun: called with the provenance at each file's first line.

    Raises:
        JournalError: a file cannot be opened (line 0), or a line is not what a journal writes.
    """
    part = part or Part()
    records = (record for file in files_of(path) for record in _read_file(file, part, on_begun))
    return records if part.request is None else _of_request(records, part.request)


def files_of(path: Path) -> list[Path]:
    """Return a journal's files, oldest first: the one that was rotated away, if it is there, and `path`."""
    before = rotated(path)
    return [before, path] if path.exists() and before.exists() else [path]


def last_time(path: Path) -> float | None:
    """Return the time of a journal's last whole line, None if it has none.

    Raises:
        JournalError: the file cannot be opened.
    """
    latest = -math.inf
    with (
        _open(path, errors="replace") as (raw, text),
        suppress(OSError, EOFError, zlib.error),  # gzip that is cut off
    ):
        if text.buffer is raw:  # plain: its end is enough
            raw.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        while (line := text.readline(_LONGEST_LINE)).endswith("\n"):
            found = _START.match(line)
            if found is not None and (time := float(found[1])) < _END_OF_TIME:
                latest = max(latest, time)
    return None if latest == -math.inf else latest


@contextmanager
def _open(path: Path, errors: str = "strict") -> Iterator[tuple[BinaryIO, io.TextIOWrapper]]:
    """Open a journal's file: as bytes on the disk, and as text."""
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(path.open("rb"))
            magic = raw.peek(4)[:4]
        except OSError as error:
            raise JournalError(path, 0, error.strerror or str(error)) from error
        if magic == _ZSTD:
            raise JournalError(path, 0, "it is compressed by zstd; decompress it first")
        buffer = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if magic.startswith(_GZIP) else raw
        yield raw, stack.enter_context(io.TextIOWrapper(buffer, encoding="utf-8", errors=errors))


def _read_file(path: Path, part: Part, on_begun: OnBegun) -> Iterator[Record]:
    with _open(path) as (_, text):
        number = 0
        while True:
            number += 1
            try:
                line = text.readline(_LONGEST_LINE)
                record = _parse(line, part, on_begun) if line else None
            # A line may hold anything: nested without end, of the wrong type, too large for a number.
            except (
                ValueError,
                TypeError,
                OverflowError,
                RecursionError,
                OSError,
                EOFError,
                zlib.error,
            ) as error:
                raise JournalError(path, number, str(error)) from error
            if not line:
                return
            if record is not None:
                yield record


def _parse(line: str, part: Part, on_begun: OnBegun) -> Record | None:
    """Return a line's record; None for a file's first line, and for one outside of the wanted time."""
    found = _START.match(line)
    if found is not None and found[2] != BEGUN and not part.since <= float(found[1]) <= part.until:
        return None
    if not line.endswith("\n"):
        long = len(line) >= _LONGEST_LINE
        raise ValueError(
            "the line is longer than any" if long else "the line is cut off: its writer stopped in the middle"
        )
    try:
        values = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    sequence, time, name = values.pop("seq", None), values.pop("t", None), values.pop("event", None)
    if type(sequence) is not int or type(time) not in (int, float) or type(name) is not str:
        raise ValueError('"seq", "t" or "event" is missing or of the wrong type')
    if not abs(time) < _END_OF_TIME:
        raise ValueError('"t" is no time')
    if name == BEGUN:
        on_begun(values)
        return None
    is_wanted = part.since <= time <= part.until
    return Record(sequence, float(time), from_plain(name, values)) if is_wanted else None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


def _of_request(records: Iterator[Record], request: str) -> Iterator[Record]:
    """Yield a request's lines and those of its loads, renumbered: the lines between them are not missing."""
    jobs: set[object] = set()
    before = number = 0
    for record in records:
        if record.sequence <= before:  # another process wrote from here on
            number = 0
            jobs.clear()
        before = record.sequence
        job = _field(record, "job")
        if _field(record, "request") == request:
            jobs |= {job} - {None}
        elif job not in jobs:
            continue
        number += 1
        yield replace(record, sequence=number)


def _field(record: Record, name: str) -> object:
    message = record.message
    return message.fields.get(name) if isinstance(message, Summary) else getattr(message, name, None)
