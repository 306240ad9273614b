"""Draws a journal over time: steps, requests' lookups and loads, and every rank's copies.

The scheduler writes the journal. It knows a copy by its rank's report, which says how long the copy waited and took, but not
when. So the copy is drawn from the moment its job was scheduled; the rest of its span is the time until the report arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kvoffload.model import events
from kvoffload.model.ids import JobId, RequestId
from kvoffload.model.transfer import Direction, Tier
from kvoffload.telemetry.journal_reader import Record
from kvoffload.telemetry.records import Summary
from kvoffload.telemetry.timeline_requests import RequestRows, args_of
from kvoffload.telemetry.trace import Canvas, Rows, Trace, TraceEvent, Track, What

_SCHEDULER, _RANKS = 1, 10  # where groups stand in the picture
STEPS = Track("scheduler", _SCHEDULER, "steps")
HOST = Track("scheduler", _SCHEDULER, "host memory")
DISK = Track("scheduler", _SCHEDULER, "disk")
NOTES = Track("scheduler", _SCHEDULER, "notes")
_LANES = {
    (Tier.HOST, Direction.STORE): (What.STORE, "stores"),
    (Tier.HOST, Direction.LOAD): (What.LOAD, "loads"),
    (Tier.DISK, Direction.STORE): (What.SPILL, "spills to disk"),
    (Tier.DISK, Direction.LOAD): (What.FETCH, "fetches from disk"),
    (Tier.REMOTE, Direction.STORE): (What.SPILL, "writes to the store"),
    (Tier.REMOTE, Direction.LOAD): (What.FETCH, "fetches from the store"),
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

_JOBS = 4096  # remembered: one that was scheduled longer ago is drawn by its report alone

Drawn = Iterator[TraceEvent]


@dataclass(frozen=True, slots=True)
class _Scheduled:
    at: float
    blocks: int
    request: RequestId | None = None


def draw(records: Iterable[Record]) -> Drawn:
    """Yield the events of a trace, for each process that appended to the journal."""
    records = iter(records)
    first = next(records, None)
    if first is None:
        return
    trace, rows = Trace(first.time), Rows()
    timeline = Timeline(trace, rows)
    for record in chain([first], records):
        if record.sequence <= timeline.sequence:
            yield from timeline.close()
            timeline = Timeline(trace, rows)
            yield from trace.instant(NOTES, "another process begins", record.time)
        yield from timeline.tell(record)
    yield from timeline.close()


class Timeline:
    """The timeline of one process. Its memory is bounded, so it may follow an engine for as long as that runs.

    Args:
        trace: what it is drawn on.
        rows: of the ranks' lanes.
    """

    def __init__(self, trace: Canvas, rows: Rows) -> None:
        self.sequence = 0
        self._trace = trace
        self._rows = rows
        self._time = 0.0
        self._jobs: dict[JobId, _Scheduled] = {}
        self._step: tuple[float, Mapping[str, object]] | None = None
        self._requests = RequestRows(trace)
        self._on_event: dict[type, Callable[[float, Any], Drawn]] = {
            events.StoreScheduled: self._on_scheduled,
            events.LoadScheduled: self._on_load_scheduled,
            events.TierCopyScheduled: self._on_disk_scheduled,
            events.RankReported: self._on_reported,
            **self._requests.on_event(),
            **dict.fromkeys(_NOTED, self._on_noted),
        }

    def tell(self, record: Record) -> Drawn:
        """Yield what this record adds."""
        missing = record.sequence - self.sequence - 1
        if missing and self.sequence:
            yield from self._trace.instant(NOTES, "lines dropped", record.time, lines=missing)
        message = record.message
        if isinstance(message, Summary):
            yield from self._on_fact(record.time, message)
        elif (react := self._on_event.get(type(message))) is not None:
            yield from react(record.time, message)
        self.sequence, self._time = record.sequence, record.time

    def close(self) -> Drawn:
        """Draw what is still open, up to the last line."""
        yield from self._end_step(self._time)
        yield from self._requests.close(self._time)

    # -- steps --------------------------------------------------------------------------------------------------

    def _on_fact(self, at: float, fact: Summary) -> Drawn:
        if fact.name == "StepScheduled":
            yield from self._end_step(at)
            self._step = at, fact.fields
        elif fact.name == "RequestSeen" and not self._requests.is_busy:
            yield from self._end_step(self._time)  # the engine was idle since
        yield from self._requests.on_fact(at, fact)
        if fact.name in ("RequestEnded", "TransferReported") and not self._requests.is_busy:
            yield from self._end_step(at)

    def _end_step(self, at: float) -> Drawn:
        """Draw a step up to the next one; if the engine became idle, up to the last record."""
        if self._step is not None:
            start, fields = self._step
            yield from self._trace.span(STEPS, What.STEP, f"step {fields.get('step')}", start, at, **fields)
        self._step = None

    # -- copies -------------------------------------------------------------------------------------------------

    def _on_scheduled(self, at: float, event: events.StoreScheduled) -> Drawn:
        self._remember(event.job, _Scheduled(at, event.blocks))
        self._trace.scheduled(event.job)
        return iter(())

    def _on_load_scheduled(self, at: float, event: events.LoadScheduled) -> Drawn:
        self._remember(event.job, _Scheduled(at, event.blocks, event.request))
        return self._requests.on_load_scheduled(at, event)

    def _on_disk_scheduled(self, at: float, event: events.TierCopyScheduled) -> Drawn:
        self._remember(event.job, _Scheduled(at, event.blocks, event.request))
        return iter(())

    def _remember(self, job: JobId, scheduled: _Scheduled) -> None:
        if len(self._jobs) >= _JOBS:
            del self._jobs[next(iter(self._jobs))]
        self._jobs[job] = scheduled

    def _on_reported(self, at: float, event: events.RankReported) -> Drawn:
        took = event.queue_s + event.copy_s
        scheduled = self._jobs.get(event.job, _Scheduled(at - took, 0))
        start = min(scheduled.at, at)
        group, (what, lane) = f"rank {event.rank}", _LANES[event.tier, event.direction]
        row = self._rows.place(group, lane, start, at)
        order = _RANKS + event.rank
        track = Track(group, order, lane, row)
        yield from self._trace.span(
            track,
            what,
            f"{what.value} {event.job}",
            start,
            at,
            job=event.job,
            rank=event.rank,
            blocks=scheduled.blocks,
            request=scheduled.request,
            outcome=event.outcome.value,
            bytes=event.copied_bytes,
        )
        copied = min(start + took, at)
        began = max(copied - event.copy_s, start)
        yield from self._trace.span(track, What.QUEUED, "queued", start, began)
        yield from self._trace.span(track, What.COPY, "copy", began, copied, bytes=event.copied_bytes)

    # -- the rest -----------------------------------------------------------------------------------------------

    def _on_noted(self, at: float, event: events.Event) -> Drawn:
        return self._trace.instant(_NOTED[type(event)], type(event).__name__, at, **args_of(event))
