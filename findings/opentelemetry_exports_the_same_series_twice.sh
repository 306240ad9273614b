#!/bin/bash
# Expected: a scrape names each series once, since Prometheus has one sample per series and time. OpenTelemetry's exporter turns
#   attributes into labels, whose values are strings. Attributes that become the same labels are one series, with their sum.
# Happens: a counter with `status=200` in one place and `status="200"` in another is exported as two samples of the same series, 3 and
#   4. The sum, 7, is nowhere. prometheus_client's own parser reads both without complaint. The same happens to `http.status`
#   and `http_status`, as two attributes of different calls. Known, of such names: open-telemetry/opentelemetry-python issue 3928.
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
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

print("opentelemetry-exporter-prometheus", version("opentelemetry-exporter-prometheus"))
meter = MeterProvider([PrometheusMetricReader(scope_info_enabled=False)]).get_meter("example")
by_type = meter.create_counter("answers")
by_type.add(3, {"status": 200})
by_type.add(4, {"status": "200"})
by_name = meter.create_counter("requests")
by_name.add(3, {"http.status": "200"})
by_name.add(4, {"http_status": "200"})
scrape = generate_latest(REGISTRY).decode()
print(*(line for line in scrape.splitlines() if line.startswith(("answers_total", "requests_total"))), sep="\n")
families = {family.name: family.samples for family in text_string_to_metric_families(scrape)}
is_so = True
for name, label in (("answers", "status"), ("requests", "http_status")):
    samples = [(sample.labels, sample.value) for sample in families[name]]
    is_so = is_so and samples == [({label: "200"}, 3), ({label: "200"}, 4)]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
