#!/bin/bash
# Expected: a span that has as many attributes as its limit (128, or OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT) keeps them and drops what
#   comes after. OpenTelemetry's specification says: "for each unique attribute key, addition of which would result in
#   exceeding the limit, SDK MUST discard that key/value pair". So what names the span, set at its start, is safe.
# Happens: each further attribute takes the place of the oldest one, and the attributes of the start are the first to go.
# Versions: opentelemetry-sdk 1.45.2, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install opentelemetry-sdk==1.45.2
cd "$folder"
OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=3 venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
with provider.get_tracer("engine").start_as_current_span("request", attributes={"request.id": "r1", "tenant": "t1"}) as span:
    for block in range(3):
        span.set_attribute(f"block.{block}", "stored")
(ended,) = exporter.get_finished_spans()
print("opentelemetry-sdk", version("opentelemetry-sdk"))
print("set: request.id, tenant, block.0, block.1, block.2, with a limit of 3")
print("kept:", *ended.attributes, "dropped:", ended.dropped_attributes)
is_so = list(ended.attributes) == ["block.0", "block.1", "block.2"] and ended.dropped_attributes == 2
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
