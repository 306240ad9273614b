#!/bin/bash
# Expected: a Summary of aioprometheus gives the quantiles 0.5, 0.9 and 0.99 with the errors of its default invariants, 0.05, 0.01 and
#   0.001. For the numbers 0 to 999 the last one is between 989 and 991.
# Happens: it is 495, 738 or 655, depending on the order of the numbers, and the median is below 300: the library underneath,
#   quantile-python, counts numbers twice. `count` and `sum` are right. Known: claws/aioprometheus issue 10.
# Versions: aioprometheus 23.12.0, quantile-python 1.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install aioprometheus==23.12.0 quantile-python==1.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import random
import sys
from importlib.metadata import version

from aioprometheus import Registry, Summary

print("aioprometheus", version("aioprometheus"), "quantile-python", version("quantile-python"))
rising = list(range(1000))
orders = {"rising": rising, "falling": rising[::-1], "shuffled": random.Random(1).sample(rising, 1000)}
seen = []
for order, numbers in orders.items():
    summary = Summary("load_seconds", "Loads", registry=Registry())
    for number in numbers:
        summary.observe({}, number)
    seen.append(summary.get({}))
    print(f"0 to 999 {order}: {dict(seen[-1])}")
is_so = all(each[0.99] < 800 and each[0.5] < 400 and each["sum"] == sum(rising) for each in seen)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
