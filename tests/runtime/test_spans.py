from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvoffload.model import facts
from kvoffload.model.causes import CopyOutcome
from kvoffload.model.errors import ConfigError
from kvoffload.model.ids import RequestId
from kvoffload.telemetry import otel, spans, timeline
from tests.runtime.parts import BLOCK, RELOAD, Side, loading

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

URL = "http://127.0.0.1:9/v1/traces"
TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
TRACE_PARENT = f"00-{TRACE:032x}-{PARENT:016x}-01"
START_S = 100.0


class Traced(Side):
    """A side with a test's exporter of spans."""

    def __init__(self, exporter: InMemorySpanExporter | None = None, **options: Any) -> None:  # noqa: ANN401
        self.exporter = exporter or InMemorySpanExporter()
        with mock.patch.object(spans, "make_exporter", return_value=self.exporter):
            super().__init__(portal=True, otlp_endpoint=URL, **options)

    def finished(self) -> list[ReadableSpan]:
        self.close()
        return list(self.exporter.get_finished_spans())


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the machine's settings of OpenTelemetry."""
    for name in ("SERVICE_NAME", "RESOURCE_ATTRIBUTES", "TRACES_SAMPLER", "SDK_DISABLED"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def of_request(found: Sequence[ReadableSpan], name: str) -> dict[str, ReadableSpan]:
    """Return the span of a request and that span's children, by name."""
    roots = [span for span in found if span.name == "kvoffload.request"]
    (root,) = [span for span in roots if attributes(span)["kvoffload.request"] == name]
    return {"request": root} | children(found, root)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def times(span: ReadableSpan) -> tuple[float, float]:
    """Return the span's start and end, in seconds since the clock's start."""
    start, end = span.start_time or 0, span.end_time or 0
    return round(start / 1e9 - START_S, 6), round(end / 1e9 - START_S, 6)


def children(found: Sequence[ReadableSpan], parent: ReadableSpan) -> dict[str, ReadableSpan]:
    assert parent.context is not None
    number = parent.context.span_id
    inside = [span for span in found if span.parent and span.parent.span_id == number]
    return {span.name.removeprefix("kvoffload."): span for span in inside}


# -- contents ---------------------------------------------------------------------------------------------------


def test_a_request_with_a_load_has_spans_from_its_lookup_to_its_end() -> None:
    side = Traced()
    side.stored()
    request = side.seen("a", trace_parent=TRACE_PARENT)
    side.clock.jump(1)
    assert side.side.lookup(request, 0) == RELOAD
    side.clock.jump(1)
    side.allocated("a", RELOAD)
    plan = side.step()
    side.clock.jump(3)
    side.done(plan, queued_s=0.5, copy_s=1.0)
    side.clock.jump(1)
    side.ended("a")
    found = side.finished()
    reported = of_request(found, "a")
    assert {name: times(span) for name, span in reported.items()} == {
        "request": (0, 6),
        "lookup": (0, 2),
        "load_wait": (2, 5),
        "load": (2, 5),
        "run": (2, 6),
    }
    lookup = attributes(reported["lookup"])
    assert (lookup["kvoffload.result"], lookup["kvoffload.hit_tokens"]) == ("hit", RELOAD)
    assert attributes(reported["load_wait"])["kvoffload.outcome"] == "loaded"
    inside = children(found, reported["load"])
    assert {name: times(span) for name, span in inside.items()} == {"queued": (2, 2.5), "copy": (2.5, 3.5)}
    (event,) = reported["request"].events
    assert (event.name, event.timestamp) == ("HitPinned", int(101e9))
    assert all(span.status.status_code is StatusCode.UNSET for span in found)


def test_request_spans_continue_the_callers_trace() -> None:
    side = Traced()
    side.stored()  # this request has no parent span
    side.ended(side.seen("a", trace_parent=TRACE_PARENT))
    side.ended(side.seen("b", trace_parent="00-no-header-at-all"))
    side.seen("open", trace_parent=TRACE_PARENT)
    found = side.finished()
    reported = of_request(found, "a")
    assert reported["request"].parent is not None
    assert reported["request"].parent.span_id == PARENT
    assert {span.context.trace_id for span in reported.values() if span.context} == {TRACE}
    others = [of_request(found, name)["request"] for name in ("first-p", "b")]
    assert [span.parent for span in others] == [None, None]
    assert len({TRACE, *[span.context.trace_id for span in others if span.context]}) == 3
    unfinished = of_request(found, "open")
    assert attributes(unfinished["request"])["kvoffload.end"] == "unfinished"
    assert set(unfinished) == {"request", "lookup"}


def test_stores_evictions_and_resets_have_spans() -> None:
    side = Traced(slots=4)
    side.stored("p")
    side.stored("q")
    side.side.reset()
    found = side.finished()
    _, second = (span for span in found if span.name == "kvoffload.store")
    assert second.parent is None
    assert set(children(found, second)) == {"queued", "copy"}
    assert attributes(second)["kvoffload.bytes"] == 64
    evicted, _ = (span for span in found if span.name == "kvoffload.BlocksEvicted")
    assert evicted.parent is None
    assert attributes(evicted) == {"kvoffload.blocks": 2, "kvoffload.cause": "space", "kvoffload.age_s": 0.0}
    (reset,) = [span for span in found if span.name == "kvoffload.ResetStarted"]
    assert reset.parent is None
    assert times(reset) == (0, 0)
    assert attributes(reset)["kvoffload.dropped_blocks"] == 4


@pytest.mark.parametrize("steps", [1, 0])
def test_a_first_token_is_an_event_of_its_requests_span(steps: int) -> None:
    side = Traced()
    side.side.seen(facts.RequestSeen(RequestId("a"), BLOCK, ((),)), lambda: True)
    side.side.lookup(RequestId("a"), 0)
    side.allocated("a", blocks=1)
    side.clock.jump(2)
    for _ in range(steps):
        side.step()
    side.ended("a")
    found = side.finished()
    assert side.counts.samples("kvoffload_first_token_seconds", "nothing") == 1
    events = of_request(found, "a")["request"].events
    reached = [(event.name, (event.attributes or {})["kvoffload.seconds"]) for event in events]
    assert reached == [("FirstTokenReached", 2.0)] * steps


def test_a_failed_load_is_an_error() -> None:
    side = Traced()
    side.done(loading(side), CopyOutcome.FAILED)
    side.ended("a")
    reported = of_request(side.finished(), "a")
    for name in ("load", "load_wait"):
        assert reported[name].status.status_code is StatusCode.ERROR
        assert reported[name].status.description == "failed"


def test_no_key_is_in_any_span() -> None:
    side = Traced()
    side.stored("secret-key-")
    assert "secret" in str(side.pool.names)
    found = side.finished()
    assert found
    assert "secret-key-0" not in "".join(span.to_json() for span in found)


def test_the_resource_names_the_engine_and_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=chat,zone=a")
    for _ in range(2):
        side = Traced(exporter)
        side.stored()
        side.close()
        exporter._stopped = False
    found = [dict(span.resource.attributes) for span in exporter.get_finished_spans()]
    assert {(each["service.name"], each["zone"], each["kvoffload.ranks"]) for each in found} == {
        ("chat", "a", 1)
    }
    assert len({each["service.instance.id"] for each in found}) == 2
    monkeypatch.delenv("OTEL_RESOURCE_ATTRIBUTES")
    ended = InMemorySpanExporter()
    otel.make_tracer({}, ended).start_span("one").end()
    assert ended.get_finished_spans()[0].resource.attributes["service.name"] == "kvoffload"


def test_span_ids_are_unique_and_do_not_change_the_engines_random_numbers() -> None:
    exporter = InMemorySpanExporter()
    drawn = []
    for _ in range(2):
        random.seed(0)
        side = Traced(exporter)
        exporter._stopped = False
        side.stored()
        side.close()
        drawn.append(random.random())
    random.seed(0)
    assert drawn == [random.random()] * 2
    ids = [span.context.span_id for span in exporter.get_finished_spans() if span.context]
    assert len(ids) == len(set(ids)) > 4


def test_a_long_run_does_not_accumulate_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_REMEMBERED", 8)
    monkeypatch.setattr(timeline, "_JOBS", 8)
    side = Traced()
    side.stored()
    for number in range(20):
        name = f"r{number}"
        request = side.seen(name)
        assert side.side.lookup(request, 0) == RELOAD
        side.allocated(name, RELOAD)
        side.done(side.step())
        side.ended(name)
        side.portal.advance(0)
    spans_ = side.side.observation.spans
    assert spans_ is not None
    assert len(spans_._canvas._contexts) <= 8
    assert len(spans_._timeline._jobs) <= 8
    assert not spans_._canvas._open
    side.close()


def test_the_environments_sampler_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    side = Traced()
    side.stored()
    side.ended(side.seen("a", trace_parent=TRACE_PARENT))
    found = side.finished()
    assert {span.context.trace_id for span in found if span.context} == {TRACE}


# -- what a bad collector costs ---------------------------------------------------------------------------------


class Failing(InMemorySpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        super().export(spans)
        return SpanExportResult.FAILURE


def work(side: Side) -> list[object]:
    """Run some requests; return what the side answers and plans."""
    side.stored()
    received: list[object] = []
    for number in range(20):
        name = f"r{number}"
        side.seen(name, prefix=f"{number % 4}-")
        received.append(side.side.lookup(RequestId(name), 0))
        side.allocated(name)
        plan = side.step((name, 3 * BLOCK))
        received += [plan, side.done(plan)]
        side.ended(name)
        if side.portal is not None:
            side.portal.advance(0)
    return received


def test_refused_batches_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    side = Traced(Failing())
    assert work(side) == work(Side())
    side.close()
    assert side.counts.total("kvoffload_span_export_errors_total") > 1
    assert caplog.text.count("spans_not_sent") == 1


def test_a_blocking_exporter_changes_nothing_and_its_drops_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = spans.SpanObserver.subscribe
    monkeypatch.setattr(
        spans.SpanObserver, "subscribe", lambda self, bus, failed: whole(self, bus, failed, capacity=16)
    )
    side = Traced()
    held = side.portal.extra
    held.hold()  # the exporter's thread waits while it sends its first batch
    side.seen("early")
    side.portal.advance(0)
    assert held.waiting == 1
    assert work(side) == work(Side())
    assert held.waiting == 1
    dropped = side.side.gauges()["kvoffload_bus_dropped_total"]["spans",]
    assert dropped > 50
    held.release()
    side.portal.advance(0)
    side.ended("early")
    side.ended(side.seen("late"))
    found = side.finished()
    assert side.side.gauges()["kvoffload_bus_dropped_total"]["spans",] == dropped
    for name, end in (("early", "unfinished"), ("late", "ended")):
        assert attributes(of_request(found, name)["request"])["kvoffload.end"] == end


def test_shutdown_waits_only_briefly_for_a_collector() -> None:
    side = Traced()
    side.portal.extra.hold()
    side.stored()
    before = side.clock.monotonic()
    side.close()
    assert 5 <= side.clock.monotonic() - before < 6


# -- the exporter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "part"), [(None, ".http."), ("http/protobuf", ".http."), ("grpc", ".grpc.")]
)
def test_the_environment_names_the_protocol(
    protocol: str | None, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if protocol is not None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    exporter = spans.make_exporter(URL)
    assert part in type(exporter).__module__
    exporter.shutdown()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon")
    with pytest.raises(ConfigError, match="carrier-pigeon"):
        spans.make_exporter(URL)


def test_without_the_packages_only_a_configured_collector_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvoffload.telemetry.otel", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delattr("kvoffload.telemetry.otel", raising=False)
    with pytest.raises(ConfigError, match=r"opentelemetry.*pip install .kvoffload\[otel\]"):
        Side(otlp_endpoint=URL)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", URL)
    assert Side().side.observation.spans is None


def test_without_a_setting_the_environments_collector_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = mock.Mock(return_value=InMemorySpanExporter())
    monkeypatch.setattr(spans, "make_exporter", exporter)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/theirs")
    for side in (Side(), Side(otlp_endpoint=URL)):
        assert side.side.observation.spans is not None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    side = Side()
    assert side.side.observation.spans is None
    assert "spans" not in side.side.bus.feeds
    assert exporter.call_args_list == [mock.call("http://127.0.0.1:9/theirs"), mock.call(URL)]


class Collector(BaseHTTPRequestHandler):
    paths: ClassVar[list[str]] = []
    names: ClassVar[set[str]] = set()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        whole = ExportTraceServiceRequest.FromString(body)
        self.paths.append(self.path)
        for resource in whole.resource_spans:
            for scope in resource.scope_spans:
                self.names.update(span.name for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_collector_receives_spans_over_http() -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/spans/here"
        side = Side(portal=True, otlp_endpoint=url)
        side.stored()
        side.close()
        server.shutdown()
        thread.join()
    assert set(Collector.paths) == {"/spans/here"}
    assert {"kvoffload.request", "kvoffload.store"} <= Collector.names
    assert side.counts.total("kvoffload_span_export_errors_total") == 0
