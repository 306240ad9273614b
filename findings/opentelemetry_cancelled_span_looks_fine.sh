#!/bin/bash
# Expected: a span that ends with an exception gets the status ERROR and the exception as an event. `record_exception` of
#   start_as_current_span is by its documentation "whether to record any exceptions raised within the context", and a block
#   `with tracer.start_span(...)` does so.
# Happens: start_as_current_span does so for subclasses of Exception only. asyncio.CancelledError is none: a request that was
#   cancelled, or that asyncio.timeout ended, leaves a span with the status UNSET and no event, as one that succeeded does.
# Versions: opentelemetry-sdk 1.45.2, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install opentelemetry-sdk==1.45.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import asyncio
import sys
from contextlib import suppress
from importlib.metadata import version

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
tracer = provider.get_tracer("engine")


async def request(name, seconds=0.0, error=None, start=tracer.start_as_current_span):
    with start(name):
        await asyncio.sleep(seconds)
        if error:
            raise error


async def run():
    await request("succeeded")
    with suppress(ValueError):
        await request("failed", error=ValueError("no"))
    with suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await request("timed out", seconds=60)
    for name, start in (("cancelled", tracer.start_as_current_span), ("cancelled, start_span", tracer.start_span)):
        task = asyncio.create_task(request(name, seconds=60, start=start))
        await asyncio.sleep(0.1)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


asyncio.run(run())
print("opentelemetry-sdk", version("opentelemetry-sdk"))
seen = {}
for span in exporter.get_finished_spans():
    seen[span.name] = span.status.status_code.name, [event.name for event in span.events]
    print(f"{span.name}: status {seen[span.name][0]}, events {seen[span.name][1]}")
fine, failed = ("UNSET", []), ("ERROR", ["exception"])
is_so = seen == {
    "succeeded": fine, "failed": failed, "timed out": fine, "cancelled": fine, "cancelled, start_span": failed,
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
