#!/bin/bash
# Expected: Gauge(..., multiprocess_mode="min") is the minimum of the values that processes have set. A process that imports
#   the module and never sets the gauge (a pool's idle worker, the parent) has no value, as it has none for a gauge with
#   labels, or in the mode "mostrecent".
# Happens: it counts as 0 from the import on. So the lowest free space of all workers is 0 until the last of them has set it,
#   and the greatest temperature below zero (mode "max") is 0. The same gauge with a label is right.
# Versions: prometheus-client 0.26.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install prometheus-client==0.26.0
cd "$folder"
mkdir values
cat >metrics.py <<'PYTHON'
from prometheus_client import Gauge

free = Gauge("free_bytes", "Free space", multiprocess_mode="min")
free_of = Gauge("tier_free_bytes", "Free space of a tier", ["tier"], multiprocess_mode="min")
change = Gauge("change", "Greatest change", multiprocess_mode="max")
recent = Gauge("recent_bytes", "Free space", multiprocess_mode="mostrecent")
PYTHON
export PROMETHEUS_MULTIPROC_DIR="$folder/values"
venv/bin/python -c 'import metrics as m; m.free.set(700); m.free_of.labels("host").set(700); m.change.set(-5); m.recent.set(700)'
venv/bin/python -c 'import metrics'
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

registry = CollectorRegistry()
MultiProcessCollector(registry)
print("prometheus-client", version("prometheus-client"))
seen = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples}
for name, value in seen.items():
    print(f"{name}: {value:g}")
is_so = seen == {"free_bytes": 0, "tier_free_bytes": 700, "change": 0, "recent_bytes": 700}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
