"""Draws a journal as a timeline: steps, requests with their lookups and loads, and the copies of each rank.

The output is a trace file for Perfetto and chrome://tracing, or OpenTelemetry spans.

A rank's report has the durations of a copy's wait in the queue and of the copy, but no start time. So a copy's span
begins when the job was scheduled, and ends when the report arrived.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TextIO, cast, get_args

from kvoffload.model import events
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.wire import LOWER_TIERS, Direction, Tier
from kvoffload.telemetry.records import Record, Summary, summary_of

Args = Mapping[str, object]


class What(StrEnum):
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
    """A line in the timeline. Viewers show lines with the same `group` together, sorted by `order` and `row`."""

    group: str
    order: int
    lane: str
    row: int = 0

    @property
    def name(self) -> str:
        return self.lane if not self.row else f"{self.lane} {self.row + 1}"


class Canvas(Protocol):
    """The output of a timeline: a trace file, or spans for a collector. Times are unix seconds."""

    def begin(self, track: Track, request: str, at: float) -> None:
        """Record that a request begins on a line of the timeline."""

    def end(self, track: Track, at: float, how: str) -> None:
        """Record that the request on a line of the timeline ends."""

    def span(self, track: Track, what: What, title: str, start: float, end: float, args: Args) -> None:
        """Draw a span. After an outer span, the caller draws the inner spans on the same line."""

    def instant(self, track: Track, name: str, at: float, args: Args) -> None:
        """Draw an event without a duration."""


class Trace:
    """A `Canvas` that writes a trace file. It writes each trace event immediately, because journals may be large.

    Args:
        write: appends a string to the file.
        origin: the time at which the trace begins, in unix seconds.
    """

    def __init__(self, write: Callable[[str], object], origin: float) -> None:
        self._write = write
        self._origin = origin
        self._groups: dict[str, int] = {}
        self._tracks: dict[Track, int] = {}
        self._separator = "\n"
        write('{"displayTimeUnit":"ms","traceEvents":[')

    @property
    def is_empty(self) -> bool:
        """Return whether nothing has been drawn."""
        return not self._tracks

    def close(self, provenance: Args) -> None:
        """Write the end of the file, including the provenance, which viewers show as metadata."""
        self._write(f'\n],"otherData":{json.dumps(provenance, separators=(",", ":"))}}}\n')

    def begin(self, track: Track, request: str, at: float) -> None:
        """Draw nothing: the request's first span shows when the request begins."""

    def end(self, track: Track, at: float, how: str) -> None:
        """Draw nothing: the request's last span shows when the request ends."""

    def span(self, track: Track, what: What, title: str, start: float, end: float, args: Args) -> None:
        length = max(round(self._microseconds(end) - self._microseconds(start), 3), 0)
        self._draw(track, {"ph": "X", "name": title, "dur": length}, start, args)

    def instant(self, track: Track, name: str, at: float, args: Args) -> None:
        self._draw(track, {"ph": "i", "name": name, "s": "t"}, at, args)

    def _draw(self, track: Track, event: dict[str, object], at: float, args: Args) -> None:
        if track not in self._tracks:
            self._name(track)
        where = {"cat": track.lane, "pid": self._groups[track.group], "tid": self._tracks[track]}
        self._emit({**event, **where, "ts": self._microseconds(at), "args": args})

    def _name(self, track: Track) -> None:
        """Write the name and order of a line of the timeline, before the line's first event."""
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


# -- the timeline --------------------------------------------------------------------------------------------------

_SCHEDULER, _REQUESTS, _RANKS = 1, 2, 10  # the order of the groups in the timeline
STEPS = Track("scheduler", _SCHEDULER, "steps")
HOST = Track("scheduler", _SCHEDULER, "host memory")
TIERS = Track("scheduler", _SCHEDULER, "lower tiers")
NOTES = Track("scheduler", _SCHEDULER, "notes")
_LANES = {
    (Tier.HOST, Direction.STORE): (What.STORE, "stores"),
    (Tier.HOST, Direction.LOAD): (What.LOAD, "loads"),
    **{(tier, Direction.STORE): (What.SPILL, f"spills to {tier.value}") for tier in LOWER_TIERS},
    **{(tier, Direction.LOAD): (What.FETCH, f"fetches from {tier.value}") for tier in LOWER_TIERS},
}
_NOTED: dict[type[events.Event], Track] = {
    events.BlocksEvicted: HOST,
    events.BlocksZeroed: HOST,
    events.SessionEnded: HOST,
    events.CapacityGrown: HOST,
    events.HostMemoryOpened: HOST,
    events.BlocksAdopted: HOST,
    events.AdoptedBlocksHit: HOST,
    events.TierBlocksEvicted: TIERS,
    events.TierReady: TIERS,
    events.TierClosed: TIERS,
    events.ResetStarted: HOST,
    events.JobAbandoned: HOST,
    events.FactRejected: NOTES,
    events.OffloadingDegraded: NOTES,
}
_JOBS = 4096  # the number of jobs to remember; older jobs are drawn only from the ranks' reports

Scheduled = events.StoreScheduled | events.LoadScheduled | events.TierCopyScheduled
Moment = events.HitPinned | events.HitDropped | events.LookupDeferred | events.FirstTokenReached


def write_trace(records: Iterable[Record], file: TextIO, provenance: Callable[[], Args]) -> bool:
    """Write the trace of a journal, with a timeline for each process that wrote the journal.

    Return whether the trace shows anything.

    Args:
        records: the journal's lines; there must be at least one.
        file: the file to write.
        provenance: returns the provenance, and is called after all lines have been read.
    """
    timeline = None
    for record in records:
        if timeline is None:
            trace = Trace(file.write, record.time)
            timeline = Timeline(trace)
        elif record.sequence <= timeline.sequence:
            timeline.close()
            timeline = Timeline(trace)
            trace.instant(NOTES, "another process begins", record.time, {})
        timeline.draw(record)
    assert timeline is not None
    timeline.close()
    trace.close(provenance())
    return not trace.is_empty


class Rows:
    """Assigns overlapping spans of a lane to different rows, because two spans in a row must be nested or disjoint."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], list[tuple[float, int]]] = {}  # for each lane, a heap of (end, row)

    def place(self, group: str, lane: str, start: float, end: float) -> int:
        """Return a row of the lane that is free at the time `start`, and reserve the row until `end`."""
        ends = self._ends.setdefault((group, lane), [])
        if not ends or ends[0][0] > start:
            heapq.heappush(ends, (end, row := len(ends)))
            return row
        row = ends[0][1]
        heapq.heapreplace(ends, (end, row))
        return row


@dataclass(slots=True)
class _Request:
    track: Track
    waits_since: float | None
    runs_since: float | None = None
    loads: dict[JobId, tuple[float, int]] = field(default_factory=dict)
    """For each load: the time at which it was scheduled, and the number of its tokens."""


class Timeline:
    """Draws the timeline of one process, in bounded memory, so that it can also follow a running engine.

    Args:
        canvas: the output.
    """

    def __init__(self, canvas: Canvas) -> None:
        self.sequence = 0
        self._canvas = canvas
        self._rows = Rows()  # the rows of the ranks' lanes
        self._time = 0.0
        self._step: tuple[float, Args] | None = None
        # For each job: the time at which it was scheduled, the number of blocks, and the request of a load.
        self._jobs: dict[JobId, tuple[float, int, RequestId | None]] = {}
        self._requests: dict[RequestId, _Request] = {}
        self._free_rows: list[int] = []  # a heap of the rows that no request uses
        self._request_rows = 0
        self.on_event: dict[type[events.Event], Callable[[float, Any], None]] = {
            **dict.fromkeys(get_args(Scheduled), self._on_scheduled),
            **dict.fromkeys(get_args(Moment), self._on_instant),
            **dict.fromkeys(_NOTED, self._on_noted),
            events.RankReported: self._on_reported,
            events.LoadEnded: self._on_load_ended,
            events.LookupAnswered: self._on_answered,
            events.FirstTokenReached: self._on_first_token,
        }
        """The methods that draw events, by the event's class."""

    def draw(self, record: Record) -> None:
        at, message = record.time, record.message
        missing = record.sequence - self.sequence - 1
        if missing and self.sequence:
            self._canvas.instant(NOTES, "lines dropped", at, {"lines": missing})
        if isinstance(message, Summary):
            self._on_fact(at, message)
        elif (react := self.on_event.get(type(message))) is not None:
            react(at, message)
        self.sequence = record.sequence
        self._time = at

    def close(self) -> None:
        """Draw the open step and all open requests as if they ended with the last record."""
        self._end_step(self._time)
        for name in list(self._requests):
            self._end(name, self._time, "unfinished")

    # -- steps and requests -------------------------------------------------------------------------------------

    def _on_fact(self, at: float, fact: Summary) -> None:
        name = RequestId(str(fact.fields.get("request")))
        match fact.name:
            case "RequestSeen":
                if not self._requests:
                    self._end_step(self._time)  # the engine has been idle since the last record
                self._begin(name, at)
            case "BlocksAllocated":
                self._find(name, at).runs_since = at
            case "StepScheduled":
                self._end_step(at)
                self._step = at, fact.fields
                for preempted in cast("list[str]", fact.fields.get("preempted", [])):
                    self._stop(RequestId(preempted), at, "preempted")
            case "RequestEnded":
                self._end(name, at, "ended")
        if fact.name in ("RequestEnded", "TransferReported") and not self._requests:
            self._end_step(at)

    def _end_step(self, at: float) -> None:
        """Draw the open step, if there is one, with its end at the time `at`."""
        if self._step is not None:
            start, fields = self._step
            self._canvas.span(STEPS, What.STEP, f"step {fields.get('step')}", start, at, fields)
        self._step = None

    def _begin(self, name: RequestId, at: float) -> _Request:
        if self._free_rows:
            row = heapq.heappop(self._free_rows)
        else:
            row = self._request_rows
            self._request_rows += 1
        request = self._requests[name] = _Request(Track("requests", _REQUESTS, "request", row), at)
        self._canvas.begin(request.track, name, at)
        return request

    def _find(self, name: RequestId, at: float) -> _Request:
        """Return a request. If the journal lacks the request's arrival, the request begins at the time `at`."""
        return self._requests.get(name) or self._begin(name, at)

    def _stop(self, name: RequestId, at: float, how: str) -> None:
        """Draw a request's run or lookup, which ends at the time `at`."""
        request = self._requests.get(name)
        if request is None:
            return
        if request.runs_since is not None:
            self._canvas.span(request.track, What.RUN, name, request.runs_since, at, {"end": how})
        elif request.waits_since is not None and how != "preempted":
            self._canvas.span(request.track, What.LOOKUP, "lookup", request.waits_since, at, {"end": how})
        request.runs_since = None
        request.waits_since = at

    def _end(self, name: RequestId, at: float, how: str) -> None:
        self._stop(name, at, how)
        request = self._requests.pop(name, None)
        if request is None:
            return
        for job in list(request.loads):
            self._loaded(request, job, at, how)
        self._canvas.end(request.track, at, how)
        heapq.heappush(self._free_rows, request.track.row)

    def _on_instant(self, at: float, event: Moment) -> None:
        track = self._find(event.request, at).track
        self._canvas.instant(track, type(event).__name__, at, summary_of(event).fields)

    def _on_first_token(self, at: float, event: events.FirstTokenReached) -> None:
        # A request that generates only one token has already ended.
        if event.request in self._requests:
            self._on_instant(at, event)

    def _on_answered(self, at: float, event: events.LookupAnswered) -> None:
        request = self._find(event.request, at)
        if request.waits_since is not None:
            # The journal may have the allocation before the answer, but the lookup's span must not overlap the run's.
            end = at if request.runs_since is None else request.runs_since
            self._canvas.span(
                request.track, What.LOOKUP, "lookup", request.waits_since, end, summary_of(event).fields
            )
        request.waits_since = None

    def _on_load_ended(self, at: float, event: events.LoadEnded) -> None:
        request = self._requests.get(event.request)
        # A partly corrupt load emits two `LoadEnded` events, of which only the first counts.
        if request is not None and event.job in request.loads:
            self._loaded(request, event.job, at, event.outcome.value)

    def _loaded(self, request: _Request, job: JobId, at: float, outcome: str) -> None:
        start, tokens = request.loads.pop(job)
        args = {"job": job, "tokens": tokens, "outcome": outcome}
        self._canvas.span(request.track, What.LOAD_WAIT, "waits for load", start, at, args)

    # -- copies, and events without a request -------------------------------------------------------------------------

    def _on_scheduled(self, at: float, event: Scheduled) -> None:
        if len(self._jobs) >= _JOBS:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[event.job] = at, event.blocks, getattr(event, "request", None)
        if isinstance(event, events.LoadScheduled):
            self._find(event.request, at).loads[event.job] = at, event.tokens

    def _on_reported(self, at: float, event: events.RankReported) -> None:
        took = event.queue_s + event.copy_s
        scheduled, blocks, request = self._jobs.get(event.job, (at - took, 0, None))
        start = min(scheduled, at)
        group = f"rank {event.rank}"
        what, lane = _LANES[event.tier, event.direction]
        track = Track(group, _RANKS + event.rank, lane, self._rows.place(group, lane, start, at))
        args = {
            "job": event.job,
            "rank": event.rank,
            "blocks": blocks,
            "request": request,
            "outcome": event.outcome.value,
            "bytes": event.copied_bytes,
        }
        self._canvas.span(track, what, f"{what.value} {event.job}", start, at, args)
        copied = min(start + took, at)
        began = max(copied - event.copy_s, start)
        self._canvas.span(track, What.QUEUED, "queued", start, began, {})
        self._canvas.span(track, What.COPY, "copy", began, copied, {"bytes": event.copied_bytes})

    def _on_noted(self, at: float, event: events.Event) -> None:
        self._canvas.instant(_NOTED[type(event)], type(event).__name__, at, summary_of(event).fields)
