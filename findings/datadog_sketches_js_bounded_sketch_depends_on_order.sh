#!/bin/bash
# Expected: Datadog's LogCollapsingLowestDenseDDSketch keeps at most `binLimit` bins and joins the lowest ones if there are more, so that
#   the high quantiles, the p99 of a latency, keep their relative error of 1%, whatever the order of the numbers is. Its twin joins the
#   highest ones.
# Happens: in JavaScript it is so if the numbers fall. If they rise, as a queue's times do when it fills, the new bins are joined as well:
#   with 512 bins the p99 of numbers from 1 to 400 million is a ten-thousandth of what it is, and the maximum too. The twin loses the low
#   quantiles if the numbers fall. Datadog's sketch for Python has the right quantiles in both orders.
# Versions: @datadog/sketches-js 2.1.1 (npm), Node.js 20, ddsketch 3.0.1, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ddsketch==3.0.1
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts @datadog/sketches-js@2.1.1
cat >quantile.cjs <<'JAVASCRIPT'
const sketches = require("@datadog/sketches-js");

const [name, numbers, quantile] = JSON.parse(require("fs").readFileSync(0));
const sketch = new sketches[name]({ relativeAccuracy: 0.01, binLimit: 512 });
for (const number of numbers) sketch.accept(number);
console.log(sketch.getValueAtQuantile(quantile));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import ddsketch

RISING = [1.002**number for number in range(10_000)]
package = json.loads(Path("node_modules/@datadog/sketches-js/package.json").read_text())
print("@datadog/sketches-js", package["version"], "ddsketch", version("ddsketch"))
right = {}
for name, quantile in (("LogCollapsingLowestDenseDDSketch", 0.99), ("LogCollapsingHighestDenseDDSketch", 0.01)):
    for order, numbers in (("rising", RISING), ("falling", RISING[::-1])):
        exact = RISING[int(quantile * (len(RISING) - 1))]
        call = subprocess.run(["node", "quantile.cjs"], input=json.dumps([name, numbers, quantile]), capture_output=True, check=True, text=True)
        sketch = getattr(ddsketch, name)(relative_accuracy=0.01, bin_limit=512)
        for number in numbers:
            sketch.add(number)
        values = float(call.stdout), sketch.get_quantile_value(quantile)
        right[name, order] = [abs(value / exact - 1) < 0.0101 for value in values]
        print(f"{name}, {order}: quantile {quantile} is {exact:.5g}, in JavaScript {values[0]:.5g}, in Python {values[1]:.5g}")
is_so = list(right.values()) == [[False, True], [True, True], [True, True], [False, True]]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
