"""OpenTelemetry spans of the reference engine continue the traces of its callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvoffload.engine import SamplingParams
from kvoffload.telemetry import spans
from tests.reference.rig import Rig, text

if TYPE_CHECKING:
    import pytest

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def test_a_callers_trace_goes_on_through_lookup_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(spans, "make_exporter", lambda endpoint: exporter)
    rig = Rig(extra={"otlp_endpoint": "http://127.0.0.1:9/v1/traces"})
    prompt = text(1, 40)
    rig.run(prompt)
    rig.forget_device()
    rig.engine.submit(
        prompt, SamplingParams(4), request_id="traced", trace_parent=f"00-{TRACE:032x}-{PARENT:016x}-01"
    )
    rig.drain()
    rig.engine.close()
    reported = [one for one in exporter.get_finished_spans() if one.context and one.context.trace_id == TRACE]
    names = sorted(one.name.removeprefix("kvoffload.") for one in reported)
    assert names == ["copy", "load", "load_wait", "lookup", "queued", "request", "run"]
    (root,) = [one for one in reported if one.name == "kvoffload.request"]
    assert root.parent is not None
    assert root.parent.span_id == PARENT
    assert (root.attributes or {})["kvoffload.request"] == "traced"
    numbers = [dict(one.attributes or {}) for one in reported if one.name == "kvoffload.lookup"]
    assert [one["kvoffload.result"] for one in numbers] == ["hit"]
