#!/bin/bash
# Expected: a histogram counts every sample, so that its `_count` is the number of calls of `observe`, or it refuses a NaN.
# Happens: a NaN is added to `_sum` and to no bucket, not even to "+Inf". From then on, `_sum` is NaN until the process ends,
#   `_count` lacks the sample, and a mean of the whole life (`_sum / _count`) is lost, without an error or a warning.
# Versions: prometheus-client 0.26.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install prometheus-client==0.26.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import math
import sys
from importlib.metadata import version

from prometheus_client import CollectorRegistry, Histogram

registry = CollectorRegistry()
waits = Histogram("wait_seconds", "Time that requests wait.", registry=registry, buckets=(1, 10))
# A rate that divides nothing by nothing, as numpy's mean of no samples does, is NaN.
samples = (0.5, math.nan, 0.5)
for sample in samples:
    waits.observe(sample)
count, total = (registry.get_sample_value(f"wait_seconds_{name}") for name in ("count", "sum"))
print("prometheus-client", version("prometheus-client"))
print(f"{len(samples)} samples, one of them NaN: _count {count:g}, _sum {total:g}")
is_so = count == 2 and math.isnan(total)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
