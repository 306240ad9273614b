#!/bin/bash
# Expected: crick's `SummaryStats` has two ways in, `add` for one value and `update` for many, and the statistics are those of the
#   values: "exact summary statistics on a data stream", skewness and kurtosis among them.
# Happens: if all values come with `add`, skewness and kurtosis are not a number, as they are for equal values, whatever the values are, and
#   the state that is pickled has it too. Count, sum, mean and variance are right. If only one of them after the first comes in an array
#   for `update`, all statistics are right.
# Versions: crick 0.0.8, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install crick==0.0.8 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import math
import pickle
import sys
from importlib.metadata import version

import numpy as np
from crick import SummaryStats

VALUES = np.array([1.0, 2.0, 5.0, 7.0])
CENTRED = VALUES - VALUES.mean()
SKEWNESS = (CENTRED**3).mean() / VALUES.std() ** 3


def collected(updated):
    stats = SummaryStats()
    for index, value in enumerate(VALUES):
        if index in updated:
            stats.update(np.array([value]))
        else:
            stats.add(value)
    return stats


print("crick", version("crick"))
print(f"{VALUES}: mean {VALUES.mean()}, variance {VALUES.var()}, skewness {SKEWNESS:.4f}")
is_so = True
for updated in ((), (1,), (3,), (0, 1, 2, 3)):
    stats = collected(updated)
    print(f"{len(VALUES) - len(updated)} added, {len(updated)} updated: mean {stats.mean()}, variance {stats.var():.4f},"
          f" skewness {stats.skew():.4f}, kurtosis {stats.kurt():.4f}")
    is_so &= stats.mean() == 3.75 and math.isclose(stats.var(), VALUES.var())
    is_so &= math.isclose(stats.skew(), SKEWNESS) if updated else math.isnan(stats.skew()) and math.isnan(stats.kurt())
is_so &= math.isnan(pickle.loads(pickle.dumps(collected(()))).skew())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
