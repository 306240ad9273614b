"""Draws a journal over time: steps, requests' lookups and loads, and every rank's copies.

The scheduler writes the journal. A rank's report says how long a copy waited and took, but not when. So the copy is drawn from
the moment its job was scheduled; the rest of its span is the time until the report arrived.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

from kvoffload.model import events
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.journal_reader import Record
from kvoffload.telemetry.records import Summary, to_plain
from kvoffload.telemetry.trace import Args, Canvas, Trace, Track, What

_SCHEDULER, _REQUESTS, _RANKS = 1, 2, 10  # the order of groups in the picture
STEPS = Track("scheduler", _SCHEDULER, "steps")
HOST = Track("scheduler", _SCHEDULER, "host memory")
DISK = Track("scheduler", _SCHEDULER, "disk")
NOTES = Track("scheduler", _SCHEDULER, "notes")
_LANES = {
    (Tier.HOST, Direction.STORE): (What.STORE, "stores"),
    (Tier.HOST, Direction.LOAD): (What.LOAD, "loads"),
    (Tier.DISK, Direction.STORE): (What.SPILL, "spills to disk"),
    (Tier.DISK, Direction.LOAD): (What.FETCH, "fetches from disk"),
    (Tier.REMOTE, Direction.STORE): (What.SPILL, "spills to remote"),
    (Tier.REMOTE, Direction.LOAD): (What.FETCH, "fetches from remote"),
}
_NOTED: dict[type[events.Event], Track] = {
    events.BlocksEvicted: HOST,
    events.BlocksZeroed: HOST,
    events.CapacityGrown: HOST,
    events.DiskBlocksEvicted: DISK,
    events.DiskOpened: DISK,
    events.DiskClosed: DISK,
    events.ResetStarted: HOST,
    events.JobAbandoned: HOST,
    events.FactRejected: NOTES,
    events.OffloadingDegraded: NOTES,
}
_JOBS = 4096  # remembered; a job scheduled longer ago is drawn by its report alone

Scheduled = events.StoreScheduled | events.LoadScheduled | events.TierCopyScheduled


def write_trace(records: Iterable[Record], file: TextIO, provenance: Callable[[], Args]) -> None:
    """Write the trace of a journal; each process that appended to the journal has its own timeline.

    Args:
        records: at least one.
        file: gets the trace.
        provenance: asked at the end.
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


class Rows:
    """Spreads overlapping spans of one lane over rows, because spans of one line may only nest."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], list[tuple[float, int]]] = {}  # heaps of (end, row)

    def place(self, group: str, lane: str, start: float, end: float) -> int:
        """Return a row of the lane that is free at `start`, and reserve it until `end`."""
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
    loads: dict[JobId, tuple[float, int]] = field(
        default_factory=dict
    )  # when they were scheduled, and their tokens


class Timeline:
    """The timeline of one process. Its memory is bounded, so it may follow an engine for as long as that runs.

    Args:
        canvas: what it is drawn on.
    """

    def __init__(self, canvas: Canvas) -> None:
        self.sequence = 0
        self._canvas = canvas
        self._rows = Rows()  # of the ranks' copies
        self._time = 0.0
        self._step: tuple[float, Args] | None = None
        self._jobs: dict[JobId, tuple[float, int, RequestId | None]] = {}  # scheduled when, blocks, request
        self._requests: dict[RequestId, _Request] = {}
        self._free_rows: list[int] = []  # a heap
        self._request_rows = 0
        self._on_event: dict[type, Callable[[float, Any], None]] = {
            events.StoreScheduled: self._on_scheduled,
            events.LoadScheduled: self._on_scheduled,
            events.TierCopyScheduled: self._on_scheduled,
            events.RankReported: self._on_reported,
            events.LoadEnded: self._on_load_ended,
            events.LookupAnswered: self._on_answered,
            events.HitPinned: self._on_instant,
            events.HitDropped: self._on_instant,
            events.LookupDeferred: self._on_instant,
            events.FirstTokenReached: self._on_first_token,
            **dict.fromkeys(_NOTED, self._on_noted),
        }

    def draw(self, record: Record) -> None:
        """Draw what this record adds."""
        at, message = record.time, record.message
        missing = record.sequence - self.sequence - 1
        if missing and self.sequence:
            self._canvas.instant(NOTES, "lines dropped", at, {"lines": missing})
        if isinstance(message, Summary):
            self._on_fact(at, message)
        elif (react := self._on_event.get(type(message))) is not None:
            react(at, message)
        self.sequence = record.sequence
        self._time = at

    def close(self) -> None:
        """Draw what is still open, up to the last record."""
        self._end_step(self._time)
        for name in list(self._requests):
            self._end(name, self._time, "unfinished")

    # -- steps and requests -------------------------------------------------------------------------------------

    def _on_fact(self, at: float, fact: Summary) -> None:
        name = RequestId(str(fact.fields.get("request")))
        match fact.name:
            case "RequestSeen":
                if not self._requests:
                    self._end_step(self._time)  # the engine was idle since
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
        """Draw a step up to the next one; if the engine became idle, up to the last record."""
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
        """Return a request; one whose arrival is not in the journal begins here."""
        return self._requests.get(name) or self._begin(name, at)

    def _stop(self, name: RequestId, at: float, how: str) -> None:
        """End a request's run. A preempted request waits again."""
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

    def _on_instant(
        self,
        at: float,
        event: events.HitPinned | events.HitDropped | events.LookupDeferred | events.FirstTokenReached,
    ) -> None:
        self._canvas.instant(self._find(event.request, at).track, type(event).__name__, at, _args(event))

    def _on_first_token(self, at: float, event: events.FirstTokenReached) -> None:
        if event.request in self._requests:  # with an answer of one token, the end may come first
            self._on_instant(at, event)

    def _on_answered(self, at: float, event: events.LookupAnswered) -> None:
        request = self._find(event.request, at)
        if request.waits_since is not None:
            # The allocation may be recorded first, and spans of one row must not overlap.
            end = at if request.runs_since is None else request.runs_since
            self._canvas.span(request.track, What.LOOKUP, "lookup", request.waits_since, end, _args(event))
        request.waits_since = None

    def _on_load_ended(self, at: float, event: events.LoadEnded) -> None:
        request = self._requests.get(event.request)
        if request is not None and event.job in request.loads:  # a corrupt load has a second event
            self._loaded(request, event.job, at, event.outcome.value)

    def _loaded(self, request: _Request, job: JobId, at: float, outcome: str) -> None:
        start, tokens = request.loads.pop(job)
        args = {"job": job, "tokens": tokens, "outcome": outcome}
        self._canvas.span(request.track, What.LOAD_WAIT, "waits for load", start, at, args)

    # -- copies, and what belongs to no request -----------------------------------------------------------------

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
        self._canvas.instant(_NOTED[type(event)], type(event).__name__, at, _args(event))


def _args(event: events.Event) -> dict[str, object]:
    fields = to_plain(event)
    del fields["event"]
    return fields
