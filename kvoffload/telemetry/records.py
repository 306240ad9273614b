"""The format of the journal's lines, and a reader of journal files.

Lines never contain the content of requests. A line has only the length of each bytes field, and only the length of each
collection that does not contain request ids, slots or tiers. All other fields are ids, counts, enums, numbers, or text from
which the content of bytes literals is removed.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import os
import re
import typing
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NewType

import msgspec
from msgspec.structs import asdict

from kvoffload.model.errors import KVOffloadError
from kvoffload.model.events import Event
from kvoffload.model.ids import RequestId, SlotId
from kvoffload.model.message import Message
from kvoffload.model.wire import Tier

_TEXT_CHARACTERS = 500
_BYTES_LITERAL = re.compile(r"""b'(?:[^'\\]|\\.)*'?|b"(?:[^"\\]|\\.)*"?""")

Write = Callable[[Any], object]


class Summary(Message, frozen=True):
    """A message's class name, and its fields as JSON values."""

    name: str
    fields: Mapping[str, object]


def summary_of(message: Any) -> Summary:  # noqa: ANN401  # any message class
    if isinstance(message, Summary):
        return message
    fields = asdict(message)
    for name, write in _writers(type(message)).items():  # type: ignore[arg-type]  # classes are hashable
        fields[name] = write(fields[name])
    return Summary(type(message).__name__, fields)


def to_plain(message: object) -> dict[str, object]:
    """Return a message's class name and fields as one dictionary, as in a journal's line."""
    summary = summary_of(message)
    return {"event": summary.name, **summary.fields}


@cache
def _writers(cls: type[Message]) -> dict[str, Write]:
    """Return, by field name, the functions that convert the fields of a message class to JSON values."""
    hints = typing.get_type_hints(cls)
    written = {name: _writer(hints[name]) for name in cls.__struct_fields__}
    return {name: write for name, write in written.items() if write is not None}


def _writer(hint: Any) -> Write | None:  # noqa: ANN401  # any annotation
    """Return the function that converts fields of the given type; None if the values are JSON values already."""
    args = typing.get_args(hint)
    if NoneType in args:
        present, _ = args
        write = _writer(present)
        return write and (lambda value: None if value is None else write(value))
    if isinstance(hint, NewType):
        return len if hint.__supertype__ is bytes else None
    if typing.get_origin(hint) is tuple:
        return _writer_of_items(args[0])
    if hint in _WRITERS:
        return _WRITERS[hint]
    if isinstance(hint, type) and issubclass(hint, Message):
        return lambda value: dict(summary_of(value).fields)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return attrgetter("value")
    raise TypeError(f"no form for a field of type {hint!r}")


def _writer_of_items(hint: Any) -> Write:  # noqa: ANN401  # any annotation
    """Return the function that converts tuples of items of the given type."""
    if hint in (SlotId, RequestId):
        return list
    if hint == tuple[Tier, int]:
        return _amounts
    return _lengths if typing.get_origin(hint) in (tuple, Sequence) else len


def _amounts(amounts: Iterable[tuple[Tier, int]]) -> list[tuple[str, int]]:
    return [(tier.value, amount) for tier, amount in amounts]


def _lengths(groups: Iterable[Sized]) -> list[int]:
    return list(map(len, groups))


def scrub(text: str) -> str:
    """Replace bytes literals in a string, and cut the string after 500 characters."""
    return _BYTES_LITERAL.sub("b'...'", text)[:_TEXT_CHARACTERS]


# Fields of type `str` are free text, because every kind of id has its own type.
_WRITERS: dict[object, Write | None] = {
    bytes: len, str: scrub, int: None, float: None, bool: None, dict[str, float]: None,
}  # fmt: skip


class _ReadOfFacts(msgspec.Struct):
    """The fact fields that the commands for journals use. Reading a line checks their types."""

    request: str = ""
    job: int = 0
    preempted: list[str] = []


_EVENTS = {cls.__name__: cls for cls in Event.__subclasses__()}


# -- reading files --------------------------------------------------------------------------------------------------

BEGUN = "JournalBegun"
"""The event name in the first line of each file. This line contains the provenance."""

_LONGEST_LINE = 1 << 24  # in bytes; a line that lists all slots of a large host takes a few hundred thousand
_END_OF_TIME = 1e11  # in unix seconds: the year 5138
_TAIL_BYTES = 1 << 20
_START = re.compile(rb'\{"seq": ?\d+, ?"t": ?(-?\d+(?:\.\d+)?(?:e[-+]?\d+)?), ?"event": ?"(\w+)"')
_GZIP = b"\x1f\x8b"


class _Line(msgspec.Struct):
    """The fields that every line of a journal has."""

    seq: int
    t: Annotated[float, msgspec.Meta(gt=-_END_OF_TIME, lt=_END_OF_TIME)]
    event: str


OnBegun = Callable[[Mapping[str, object]], object]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a journal's file.

    Args:
        sequence: the line's number. Missing numbers belong to dropped lines.
        time: the time in unix seconds, by the clock of the process that wrote the line.
        message: an event, or the summary of a fact.
    """

    sequence: int
    time: float
    message: Event | Summary


class JournalError(KVOffloadError):
    """Raised if a journal's file cannot be read.

    Args:
        path: the file's path.
        line: the number of the line that cannot be read; 0 if the file cannot be opened.
        problem: the reason why the line or the file cannot be read.
    """

    def __init__(self, path: Path, line: int, problem: str) -> None:
        self.path = path
        self.line = line
        self.problem = problem
        super().__init__(f"{path}, line {line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of a journal's lines; by default all lines.

    Args:
        since, until: the times of the first and the last line, in unix seconds.
        request: the request whose lines to select, including the lines of the request's loads; None for all requests.
    """

    since: float = -math.inf
    until: float = math.inf
    request: str | None = None


def read_journal(
    path: Path, part: Selection | None = None, on_begun: OnBegun = lambda provenance: None
) -> Iterator[Record]:
    """Yield the lines of a journal's files, the oldest line first.

    Args:
        path: the journal's file. If a rotated file exists, its lines come first.
        part: the lines to read; by default all lines.
        on_begun: called with the provenance in each file's first line.

    Raises:
        JournalError: a file cannot be opened, or a line does not have the journal's format.
    """
    part = part or Selection()
    records = (record for file in files_of(path) for record in _read_file(file, part, on_begun))
    return records if part.request is None else _of_request(records, part.request)


def rotated(path: Path) -> Path:
    """Return the path of the rotated file, which is the name of a journal file after it was full."""
    return Path(f"{path}.1")


def files_of(path: Path) -> list[Path]:
    """Return a journal's files: the rotated file, if it exists, and then `path`."""
    before = rotated(path)
    return [before, path] if os.path.exists(path) and os.path.exists(before) else [path]


def last_time(path: Path) -> float | None:
    """Return the time of a journal's last complete line; None if the journal has no complete line.

    Raises:
        JournalError: the file cannot be opened.
    """
    latest = -math.inf
    # Reading a truncated gzip file raises an error after the last complete line.
    with _open(path) as file, suppress(OSError, EOFError, zlib.error):
        if not isinstance(file, gzip.GzipFile):  # seeking in a gzip file takes as long as reading it
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
            found = _START.match(line)
            if found is not None and (time := float(found[1])) < _END_OF_TIME:
                latest = max(latest, time)
    return None if latest == -math.inf else latest


@contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    try:
        raw = path.open("rb")
        is_packed = raw.peek(len(_GZIP)).startswith(_GZIP)
    except OSError as error:
        raise JournalError(path, 0, error.strerror or str(error)) from error
    with raw:
        yield gzip.GzipFile(fileobj=raw) if is_packed else raw


def _read_file(path: Path, part: Selection, on_begun: OnBegun) -> Iterator[Record]:
    with _open(path) as file:
        for number in itertools.count(1):
            try:
                if not (line := file.readline(_LONGEST_LINE)):
                    return
                record = _parse(line, part, on_begun)
            # A line may have any content, even JSON that is nested too deep for the parser.
            except (ValueError, RecursionError, OSError, EOFError, zlib.error) as error:
                raise JournalError(path, number, str(error)) from error
            if record is not None:
                yield record


def _parse(line: bytes, part: Selection, on_begun: OnBegun) -> Record | None:
    """Return the record in a line, or None for a file's first line and for lines that `part` does not select."""
    found = _START.match(line)
    if found is not None and found[2] != BEGUN.encode() and not part.since <= float(found[1]) <= part.until:
        return None
    if not line.endswith(b"\n"):
        long = len(line) >= _LONGEST_LINE
        raise ValueError(
            "the line is longer than any" if long else "the line is cut off: its writer stopped in the middle"
        )
    try:  # msgspec would refuse lone surrogates, which represent bytes that are not UTF-8
        values = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    head = msgspec.convert(values, _Line)
    for name in _Line.__struct_fields__:
        del values[name]
    if head.event == BEGUN:
        on_begun(values)
        return None
    if not part.since <= head.t <= part.until:
        return None
    message = msgspec.convert(values, _EVENTS.get(head.event, _ReadOfFacts))
    return Record(head.seq, head.t, message if isinstance(message, Event) else Summary(head.event, values))


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


def _of_request(records: Iterator[Record], request: str) -> Iterator[Record]:
    """Yield the records of a request and its loads, with new sequence numbers without gaps."""
    jobs: set[object] = set()
    before = number = 0
    for record in records:
        if record.sequence <= before:  # the records of another process begin here
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
