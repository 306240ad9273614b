#!/bin/bash
# Expected: crick's `SummaryStats` computes "exact summary statistics": `add(x, count)` and `update(x, count)` take how often a value
#   occurred, as a histogram has it. Four seconds three times and nine seconds once have the sum 21 and the mean 5.25.
# Happens: the counts are counted, but the values are summed once each: the sum is 13 and the mean 3.25, less than the minimum. The
#   variance is wrong too. The same values one by one have the right sum, mean and variance.
# Versions: crick 0.0.8, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install crick==0.0.8 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import math
import sys
from importlib.metadata import version

import numpy as np
from crick import SummaryStats

print("crick", version("crick"))
added, updated, singly = SummaryStats(), SummaryStats(), SummaryStats()
added.add(4.0, 3)
added.add(9.0, 1)
updated.update(np.array([4.0, 9.0]), np.array([3, 1]))
for value in (4.0, 4.0, 4.0, 9.0):
    singly.add(value)
seen = {}
for name, stats in (("added with counts", added), ("updated with counts", updated), ("one by one", singly)):
    seen[name] = stats.count(), stats.sum(), stats.mean()
    print(f"{name}: count {stats.count()}, sum {stats.sum()}, mean {stats.mean()}, minimum {stats.min()}, variance {stats.var():.4f}")
is_so = seen == {"added with counts": (4, 13, 3.25), "updated with counts": (4, 13, 3.25), "one by one": (4, 21, 5.25)}
is_so &= math.isclose(singly.var(), 4.6875) and not math.isclose(added.var(), 4.6875)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
