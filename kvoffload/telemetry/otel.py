"""Exports a timeline as OpenTelemetry spans. To import this module, the extra `otel` must be installed.

    request                 from a request's arrival to its end; a child of the engine's span if there is one
      lookup                one for each admission, with its result; pins are events of the request's span
      load_wait             the request waits for its load
      run                   from admission to end or preemption
      load                  one rank's copy for the load; contains the spans `queued` and `copy`
      fetch                 one rank's copy for a fetch from a lower tier; contains the same spans
    spill                   one rank's copy for a spill to a lower tier; contains the same spans
    store                   one rank's copy for a store; contains the same spans

Events that do not belong to a request, such as a reset or an eviction, are spans of length zero.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from random import Random

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import kvoffload
from kvoffload.model.causes import LoadOutcome
from kvoffload.telemetry.timeline import Args, Track, What

_SCOPE = "kvoffload"
_REMEMBERED = 4096  # the number of requests whose contexts are kept: a copy may end after its request
_INSIDE = (What.QUEUED, What.COPY)
_OUTER = (What.STORE, What.LOAD, What.SPILL, What.FETCH)
# `CopyOutcome` has the same values for failures, so the set covers outcomes of loads and of copies.
_FAILURES = {one.value for one in (LoadOutcome.FAILED, LoadOutcome.CORRUPT, LoadOutcome.ABANDONED)}


class SpanCanvas:
    """A `Canvas` that exports a timeline as spans.

    Args:
        tracer: creates the spans.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.trace_parent: str | None = None
        """The W3C `traceparent` of the next request. It is ignored if it is malformed."""
        self._tracer = tracer
        self._extract = TraceContextTextMapPropagator().extract
        self._open: dict[Track, Span] = {}
        self._contexts: dict[str, Context] = {}
        self._outer = Context()

    def begin(self, track: Track, request: str, at: float) -> None:
        carrier = {"traceparent": self.trace_parent} if self.trace_parent is not None else {}
        span = self._tracer.start_span(
            f"{_SCOPE}.request",
            self._extract(carrier, Context()),
            attributes={f"{_SCOPE}.request": request},
            start_time=_nanoseconds(at),
        )
        self._open[track] = span
        if len(self._contexts) >= _REMEMBERED:
            del self._contexts[next(iter(self._contexts))]
        self._contexts[request] = set_span_in_context(span, Context())

    def end(self, track: Track, at: float, how: str) -> None:
        span = self._open.pop(track)
        span.set_attribute(f"{_SCOPE}.end", how)
        span.end(_nanoseconds(at))

    def span(self, track: Track, what: What, title: str, start: float, end: float, args: Args) -> None:
        """Export a span, unless it is a step's span."""
        if what is What.STEP:
            return
        context = self._outer if what in _INSIDE else self._context(track, args)
        span = self._tracer.start_span(
            f"{_SCOPE}.{what.value}", context, attributes=_attributes(args), start_time=_nanoseconds(start)
        )
        if what is What.LOOKUP and "hit_tokens" in args:
            span.set_attribute(f"{_SCOPE}.result", "hit" if args["hit_tokens"] else "miss")
        if args.get("outcome") in _FAILURES:
            span.set_status(Status(StatusCode.ERROR, str(args["outcome"])))
        if what in _OUTER:
            self._outer = set_span_in_context(span, Context())
        span.end(_nanoseconds(end))

    def instant(self, track: Track, name: str, at: float, args: Args) -> None:
        """Add an event to the track's open span. Without an open span, export a span of length zero."""
        attributes, when = _attributes(args), _nanoseconds(at)
        if (span := self._open.get(track)) is not None:
            span.add_event(name, attributes, when)
        else:
            alone = self._tracer.start_span(
                f"{_SCOPE}.{name}", Context(), attributes=attributes, start_time=when
            )
            alone.end(when)

    def _context(self, track: Track, args: Args) -> Context:
        """Return the context of the request on a track or in `args`; empty without a request, as for a store."""
        if (request := self._open.get(track)) is not None:
            return set_span_in_context(request, Context())
        return self._contexts.get(str(args.get("request")), Context())


class OwnIds(IdGenerator):
    """Generates span ids and trace ids with a separate random generator.

    By default, the SDK uses Python's global generator, which engines seed. Then all engines would generate the same
    ids, and spans would change the random numbers that an engine gets.
    """

    def __init__(self) -> None:
        self._random = Random()

    def generate_span_id(self) -> int:
        return self._random.randrange(1, 1 << 64)

    def generate_trace_id(self) -> int:
        return self._random.randrange(1, 1 << 128)


def make_tracer(about: Mapping[str, str | int], ended: SpanExporter) -> Tracer:
    """Return a tracer for one engine without changing global state.

    Args:
        about: attributes of the engine. OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME take precedence.
        ended: exports each sampled span when the span ends.
    """
    described = {
        "service.name": _SCOPE,
        "service.instance.id": str(uuid.uuid4()),
        "process.pid": os.getpid(),
        **about,
    }
    resource = Resource.create(described).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=OwnIds())
    provider.add_span_processor(SimpleSpanProcessor(ended))
    return provider.get_tracer(_SCOPE, kvoffload.__version__)


def _attributes(args: Args) -> dict[str, str | bool | int | float]:
    return {f"{_SCOPE}.{name}": value for name, value in args.items() if isinstance(value, str | int | float)}


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)
