#!/bin/bash
# Expected: `add(value, weight)` of Datadog's DDSketch takes "a positive float", and only the weights' ratios matter to a quantile,
#   which has a "relative accuracy" of 1%. The p99 of 1 to 100 is about 99, be each weight 1, a tenth (a share of a request), or a
#   hundredth (normalized, so that they add up to 1).
# Happens: the rank is `quantile * (sum of weights - 1)`. With weights of a tenth, the p99 is 89. With weights that add up to 1,
#   it is 1, as all other quantiles are: a latency's p99 is its minimum. The discussion of DataDog/sketches-py pull request 14
#   mentions small weights.
# Versions: ddsketch 3.0.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ddsketch==3.0.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from ddsketch import DDSketch

print("ddsketch", version("ddsketch"))
seen = {}
for weight in (1.0, 0.1, 0.01):
    sketch = DDSketch(0.01)
    for value in range(1, 101):
        sketch.add(value, weight)
    seen[weight] = [round(sketch.get_quantile_value(quantile)) for quantile in (0.5, 0.9, 0.99, 1)]
    print(f"1 to 100, each with weight {weight}: p50, p90, p99 and the maximum are {seen[weight]}")
is_so = 98 <= seen[1.0][2] <= 100 and seen[0.1][2] <= 92 and seen[0.01][:3] == [1, 1, 1]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
