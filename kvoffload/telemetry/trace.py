"""The part of the trace-event format that the timeline needs. Perfetto and chrome://tracing open it.

Times come in seconds; the format has microseconds since the trace's beginning.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

TraceEvent = dict[str, Any]


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


class Rows:
    """Spreads overlapping spans of one lane over rows, because spans of one line may only nest."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], list[tuple[float, int]]] = {}  # heaps of (end, row)

    def place(self, group: str, lane: str, start: float, end: float) -> int:
        """Return the row of the lane that has been free for longest, if it is at `start`, or a new one.

        Reserve it until `end`.
        """
        ends = self._ends.setdefault((group, lane), [])
        if not ends or ends[0][0] > start:
            heapq.heappush(ends, (end, row := len(ends)))
            return row
        row = ends[0][1]
        heapq.heapreplace(ends, (end, row))
        return row


class Canvas(Protocol):
    """What a timeline is drawn on: a trace file, or spans that are sent to a collector.

    Each call may yield events; the caller must consume them all.
    """

    def begin(self, track: Track, request: str, at: float) -> None:
        """A request begins on this line."""

    def end(self, track: Track, at: float, how: str) -> None:
        """The request of this line has ended."""

    def scheduled(self, job: int) -> None:
        """A store was scheduled; the evictions that follow made room for it."""

    def span(
        self, track: Track, what: What, title: str, start: float, end: float, /, **args: object
    ) -> Iterator[TraceEvent]:
        """Draw a span. A span inside it follows it on the same line."""

    def instant(self, track: Track, name: str, at: float, /, **args: object) -> Iterator[TraceEvent]:
        """Draw something that took no time."""


class Trace:
    """The events of one trace; a `Canvas`.

    Args:
        origin: the time, in seconds, that is 0 in the trace.
    """

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._groups: dict[str, int] = {}
        self._tracks: dict[Track, int] = {}

    def begin(self, track: Track, request: str, at: float) -> None:
        """Draw nothing: a row of requests shows what they did."""

    def end(self, track: Track, at: float, how: str) -> None:
        """Draw nothing."""

    def scheduled(self, job: int) -> None:
        """Draw nothing: notes have their own line."""

    def span(
        self, track: Track, what: What, title: str, start: float, end: float, /, **args: object
    ) -> Iterator[TraceEvent]:
        """Draw a span."""
        yield from self._names(track)
        event = self._event(track, "X", title, start, args)
        yield {**event, "dur": max(self._microseconds(end) - event["ts"], 0)}

    def instant(self, track: Track, name: str, at: float, /, **args: object) -> Iterator[TraceEvent]:
        """Draw something that took no time."""
        yield from self._names(track)
        yield {**self._event(track, "i", name, at, args), "s": "t"}

    def _event(self, track: Track, phase: str, name: str, at: float, args: dict[str, object]) -> TraceEvent:
        return {
            "ph": phase,
            "name": name,
            "cat": track.lane,
            "pid": self._groups[track.group],
            "tid": self._tracks[track],
            "ts": self._microseconds(at),
            "args": args,
        }

    def _names(self, track: Track) -> Iterator[TraceEvent]:
        """Yield what names a line to the viewer, at its first use."""
        if track in self._tracks:
            return
        if track.group not in self._groups:
            process = self._groups[track.group] = len(self._groups) + 1
            yield _metadata("process_name", process, 0, name=track.group)
            yield _metadata("process_sort_index", process, 0, sort_index=track.order)
        process = self._groups[track.group]
        thread = self._tracks[track] = len(self._tracks) + 1
        yield _metadata("thread_name", process, thread, name=track.name)
        yield _metadata("thread_sort_index", process, thread, sort_index=1000 * track.order + track.row)

    def _microseconds(self, at: float) -> float:
        return round((at - self._origin) * 1e6, 3)


def render(
    events: Iterable[TraceEvent], provenance: Callable[[], Mapping[str, object]] = dict
) -> Iterator[str]:
    """Yield the text of a trace file, bit by bit: journals may be large.

    Args:
        events: of the trace.
        provenance: asked at the end; viewers show it as the trace's metadata.
    """
    yield '{"displayTimeUnit":"ms","traceEvents":['
    separator = "\n"
    for event in events:
        yield separator + json.dumps(event, separators=(",", ":"))
        separator = ",\n"
    yield f'\n],"otherData":{json.dumps(provenance(), separators=(",", ":"))}}}\n'


def _metadata(what: str, process: int, thread: int, **args: object) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}
