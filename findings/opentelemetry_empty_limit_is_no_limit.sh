#!/bin/bash
# Expected: an empty environment variable is as one that is not set, so that a manifest's `value: ""` leaves the default, 128
#   attributes. OpenTelemetry's specification says: "The SDK MUST interpret an empty value of an environment variable the same
#   way as when the variable is unset." The documentation of SpanLimits knows a number, None or not set.
# Happens: an empty OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, OTEL_SPAN_EVENT_COUNT_LIMIT or OTEL_SPAN_LINK_COUNT_LIMIT takes the limit
#   away, and a span that lives long grows without end.
# Versions: opentelemetry-sdk 1.45.2, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install opentelemetry-sdk==1.45.2
cd "$folder"
cat >count.py <<'PYTHON'
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
with provider.get_tracer("engine").start_as_current_span("request") as span:
    for number in range(1000):
        span.set_attribute(f"block.{number}", "stored")
        span.add_event(f"block.{number}")
(ended,) = exporter.get_finished_spans()
print(len(ended.attributes), len(ended.events))
PYTHON
venv/bin/python -c 'from importlib.metadata import version; print("opentelemetry-sdk", version("opentelemetry-sdk"))'
unset OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT OTEL_SPAN_EVENT_COUNT_LIMIT OTEL_ATTRIBUTE_COUNT_LIMIT
plain=$(venv/bin/python count.py 2>log)
empty=$(OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="" OTEL_SPAN_EVENT_COUNT_LIMIT="" venv/bin/python count.py 2>log)
echo "attributes and events of 1000 each, not set: $plain, empty: $empty"
[[ $plain == "128 128" && $empty == "1000 1000" ]]
