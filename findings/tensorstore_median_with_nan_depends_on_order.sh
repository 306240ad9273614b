#!/bin/bash
# Expected: a median does not depend on the order of the numbers. With a NaN among them it is NaN, as tensorstore's "mean" and
#   numpy's median are, or that of the others.
# Happens: the "median" of tensorstore.downsample is NaN for a third of the orders of 1, 2, 3, 4 and a NaN, and 2, 3 or 4 for the others,
#   without an error. So a check for NaN in the reduced data finds some blocks with a NaN and misses others.
# Versions: tensorstore 0.1.86, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tensorstore==0.1.86 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import itertools
import sys
from collections import Counter
from importlib.metadata import version

import numpy as np
import tensorstore

print("tensorstore", version("tensorstore"), "numpy", np.__version__)
rows = np.array(list(itertools.permutations((1.0, 2.0, 3.0, 4.0, np.nan))))
found = {}
for method in ("mean", "median"):
    results = tensorstore.downsample(tensorstore.array(rows), [1, 5], method).read().result()[:, 0]
    found[method] = Counter("NaN" if np.isnan(result) else f"{result:g}" for result in results)
    print(f"the {method} of {len(rows)} orders of the same five numbers: {dict(found[method])}")
is_so = found["mean"] == {"NaN": 120} and len(found["median"]) > 2 and found["median"]["NaN"] > 0
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
