"""The requests' part of a timeline: each has a row from its arrival to its end."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from kvoffload.model import events
from kvoffload.model.ids import RequestId
from kvoffload.telemetry.records import Summary, to_plain
from kvoffload.telemetry.trace import Canvas, TraceEvent, Track, What

_ORDER = 2
Drawn = Iterator[TraceEvent]


@dataclass(slots=True)
class _Request:
    track: Track
    waits_since: float | None
    runs_since: float | None = None
    loads: dict[int, tuple[float, events.LoadScheduled]] = field(default_factory=dict)


class RequestRows:
    """Draws requests.

    Args:
        trace: the canvas.
    """

    def __init__(self, trace: Canvas) -> None:
        self._trace = trace
        self._live: dict[RequestId, _Request] = {}
        self._free: list[int] = []
        self._rows = 0

    @property
    def is_busy(self) -> bool:
        """Whether any request has begun and not ended."""
        return bool(self._live)

    def on_event(self) -> dict[type, Callable[[float, Any], Drawn]]:
        """Return the handler of each event."""
        return {
            events.HitPinned: self._on_instant,
            events.HitDropped: self._on_instant,
            events.LookupDeferred: self._on_instant,
            events.LookupAnswered: self._on_settled,
            events.LoadEnded: self._on_load_ended,
            events.FirstTokenReached: self._on_first_token,
        }

    def on_fact(self, at: float, fact: Summary) -> Drawn:
        """Draw what a fact adds."""
        name = RequestId(str(fact.fields.get("request")))
        if fact.name == "RequestSeen":
            self._begin(name, at)
        elif fact.name == "BlocksAllocated":
            self._find(name, at).runs_since = at
        elif fact.name == "StepScheduled":
            for preempted in cast("list[str]", fact.fields.get("preempted", [])):
                yield from self._stop(RequestId(preempted), at, "preempted")
        elif fact.name == "RequestEnded":
            yield from self._stop(name, at, "ended")
            yield from self._end(name, at, "ended")

    def on_load_scheduled(self, at: float, event: events.LoadScheduled) -> Drawn:
        """Start a request's wait for a load."""
        self._find(event.request, at).loads[event.job] = (at, event)
        return iter(())

    def close(self, at: float) -> Drawn:
        """Draw what is still open."""
        for name in list(self._live):
            yield from self._stop(name, at, "unfinished")
            yield from self._end(name, at, "unfinished")

    # -- inside -------------------------------------------------------------------------------------------------

    def _on_instant(
        self,
        at: float,
        event: events.HitPinned | events.HitDropped | events.LookupDeferred | events.FirstTokenReached,
    ) -> Drawn:
        fields = args_of(event)
        return self._trace.instant(self._find(event.request, at).track, type(event).__name__, at, **fields)

    def _on_first_token(self, at: float, event: events.FirstTokenReached) -> Drawn:
        """Draw it, unless the request has ended: with an answer of one token, the end may come first."""
        return self._on_instant(at, event) if event.request in self._live else iter(())

    def _on_settled(self, at: float, event: events.LookupAnswered) -> Drawn:
        request = self._find(event.request, at)
        if request.waits_since is not None:
            # The allocation may be recorded first, and spans of one row must not overlap.
            end = at if request.runs_since is None else request.runs_since
            yield from self._trace.span(
                request.track, What.LOOKUP, "lookup", request.waits_since, end, **args_of(event)
            )
        request.waits_since = None

    def _on_load_ended(self, at: float, event: events.LoadEnded) -> Drawn:
        request = self._live.get(event.request)
        start, load = request.loads.pop(event.job, (at, None)) if request is not None else (at, None)
        if request is None or load is None:  # of a corrupt load, the second event
            return
        yield from self._waited(request, load, start, at, event.outcome.value)

    def _waited(
        self, request: _Request, load: events.LoadScheduled, start: float, at: float, outcome: str
    ) -> Drawn:
        return self._trace.span(
            request.track,
            What.LOAD_WAIT,
            "waits for load",
            start,
            at,
            job=load.job,
            tokens=load.tokens,
            outcome=outcome,
        )

    def _stop(self, name: RequestId, at: float, how: str) -> Drawn:
        """End a request's run. A preempted request waits again."""
        request = self._live.get(name)
        if request is None:
            return
        if request.runs_since is not None:
            yield from self._trace.span(request.track, What.RUN, name, request.runs_since, at, end=how)
        elif request.waits_since is not None and how != "preempted":
            yield from self._trace.span(
                request.track, What.LOOKUP, "lookup", request.waits_since, at, end=how
            )
        request.runs_since, request.waits_since = None, at

    def _begin(self, name: RequestId, at: float) -> _Request:
        if self._free:
            row = heapq.heappop(self._free)
        else:
            row, self._rows = self._rows, self._rows + 1
        request = self._live[name] = _Request(Track("requests", _ORDER, "request", row), at)
        self._trace.begin(request.track, name, at)
        return request

    def _find(self, name: RequestId, at: float) -> _Request:
        """Return a request; one whose arrival is not in the journal begins here."""
        return self._live.get(name) or self._begin(name, at)

    def _end(self, name: RequestId, at: float, how: str) -> Drawn:
        request = self._live.pop(name, None)
        if request is None:
            return
        for start, load in request.loads.values():
            yield from self._waited(request, load, start, at, how)
        self._trace.end(request.track, at, how)
        heapq.heappush(self._free, request.track.row)


def args_of(event: events.Event) -> dict[str, object]:
    """Return an event's fields for a trace."""
    fields = to_plain(event)
    del fields["event"]
    return fields
