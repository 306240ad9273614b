#!/bin/bash
# Expected: OpenTelemetry's views choose the aggregation of an instrument, and an exponential histogram is one of those the SDK has. An
#   exporter that cannot show one leaves it out, with a warning, and shows all other metrics.
# Happens: the Prometheus exporter raises an AttributeError as soon as such a histogram has one value, at every scrape. So the
#   endpoint shows nothing any more, neither the other instruments nor metrics made with prometheus_client itself.
# Versions: opentelemetry-exporter-prometheus 0.66b2, opentelemetry-sdk 1.45.2, prometheus-client 0.26.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install opentelemetry-exporter-prometheus==0.66b2 opentelemetry-sdk==1.45.2 prometheus-client==0.26.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from prometheus_client import REGISTRY, Counter, generate_latest


def scrape():
    try:
        lines = generate_latest(REGISTRY).decode().splitlines()
    except AttributeError as error:
        return f"AttributeError: {error}"
    return sorted(line for line in lines if line.startswith(("answers_total ", "requests_total ")))


print("opentelemetry-exporter-prometheus", version("opentelemetry-exporter-prometheus"))
view = View(instrument_name="seconds", aggregation=ExponentialBucketHistogramAggregation())
provider = MeterProvider([PrometheusMetricReader(scope_info_enabled=False)], views=[view])
meter = provider.get_meter("example")
Counter("answers", "made with prometheus_client").inc()
meter.create_counter("requests").add(1)
histogram = meter.create_histogram("seconds")
before = scrape()
histogram.record(0.5)
after, again = scrape(), scrape()
print("before the first value:", before)
print("after it:", after)
is_so = before == ["answers_total 1.0", "requests_total 1.0"] and after == again and str(after).startswith("AttributeError")
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
