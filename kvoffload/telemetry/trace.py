"""What a timeline is drawn on, and the trace file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Args = Mapping[str, object]


class What(StrEnum):
    """The kinds of spans."""

    STEP = "step"
    LOOKUP = "lookup"
    LOAD_WAIT = "load_wait"
    RUN = "run"
    STORE = "store"
    LOAD = "load"
    SPILL = "spill"
    FETCH = "fetch"
    QUEUED = "queued"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Track:
    """One line of the picture. Lines of one `group` stand together, in the order of `order` and `row`."""

    group: str
    order: int
    lane: str
    row: int = 0

    @property
    def name(self) -> str:
        """The label beside the line."""
        return self.lane if not self.row else f"{self.lane} {self.row + 1}"


class Canvas(Protocol):
    """What a timeline is drawn on: a trace file, or spans that are sent to a collector. Times are unix seconds."""

    def begin(self, track: Track, request: str, at: float) -> None:
        """A request begins on this line."""

    def end(self, track: Track, at: float, how: str) -> None:
        """The request of this line has ended."""

    def span(self, track: Track, what: What, title: str, start: float, end: float, args: Args) -> None:
        """Draw a span. A span inside it follows it on the same line."""

    def instant(self, track: Track, name: str, at: float, args: Args) -> None:
        """Draw a moment."""


class Trace:
    """A `Canvas` that writes a file of trace events, as the timeline is drawn: journals may be large.

    Args:
        write: takes the file's text, piece by piece.
        origin: unix seconds; the time 0 of the trace.
    """

    def __init__(self, write: Callable[[str], object], origin: float) -> None:
        self._write = write
        self._origin = origin
        self._groups: dict[str, int] = {}
        self._tracks: dict[Track, int] = {}
        self._separator = '{"displayTimeUnit":"ms","traceEvents":[\n'

    def close(self, provenance: Args) -> None:
        """Write the end of the file; viewers show the provenance as the trace's metadata."""
        self._write(f'\n],"otherData":{json.dumps(provenance, separators=(",", ":"))}}}\n')

    def begin(self, track: Track, request: str, at: float) -> None:
        """Draw nothing: a row of requests shows what they did."""

    def end(self, track: Track, at: float, how: str) -> None:
        """Draw nothing."""

    def span(self, track: Track, what: What, title: str, start: float, end: float, args: Args) -> None:
        """Draw a span."""
        length = max(round(self._microseconds(end) - self._microseconds(start), 3), 0)
        self._draw(track, {"ph": "X", "name": title, "dur": length}, start, args)

    def instant(self, track: Track, name: str, at: float, args: Args) -> None:
        """Draw a moment."""
        self._draw(track, {"ph": "i", "name": name, "s": "t"}, at, args)

    def _draw(self, track: Track, event: dict[str, object], at: float, args: Args) -> None:
        if track not in self._tracks:
            self._name(track)
        where = {"cat": track.lane, "pid": self._groups[track.group], "tid": self._tracks[track]}
        self._emit({**event, **where, "ts": self._microseconds(at), "args": args})

    def _name(self, track: Track) -> None:
        """Name a line to the viewer, at its first use."""
        if track.group not in self._groups:
            self._groups[track.group] = len(self._groups) + 1
            self._describe("process", track, 0, track.group, track.order)
        self._tracks[track] = len(self._tracks) + 1
        self._describe("thread", track, self._tracks[track], track.name, 1000 * track.order + track.row)

    def _describe(self, what: str, track: Track, thread: int, name: str, order: int) -> None:
        where = {"ph": "M", "pid": self._groups[track.group], "tid": thread, "ts": 0}
        self._emit({**where, "name": f"{what}_name", "args": {"name": name}})
        self._emit({**where, "name": f"{what}_sort_index", "args": {"sort_index": order}})

    def _emit(self, event: Args) -> None:
        self._write(self._separator + json.dumps(event, separators=(",", ":")))
        self._separator = ",\n"

    def _microseconds(self, at: float) -> float:
        return round((at - self._origin) * 1e6, 3)
