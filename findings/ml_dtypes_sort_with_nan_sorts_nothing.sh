#!/bin/bash
# Expected: np.sort puts NaN last and the numbers in order, as it does for float16, so that the median of an array with a NaN
#   is NaN, which np.median's documentation counts on. With bfloat16 and float8s, np.max and np.isnan do know NaN.
# Happens: with bfloat16 or a float8, one NaN may leave the array as it was, the numbers before and after the NaN out of order.
#   np.median and np.percentile then return one of the numbers, here the smallest, without a warning.
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import math
import sys

import ml_dtypes
import numpy as np

VALUES = [3, math.nan, 1, 2, 5]
print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
seen = {}
for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    array = np.array(VALUES, kind)
    in_order, median = np.sort(array).astype(float).tolist(), float(np.median(array))
    seen[array.dtype.name] = in_order, median, float(np.max(array))
    print(f"{array.dtype.name}: sort {in_order}, median {median}, max {np.max(array)}")
_, plain, *others = [None, *seen.values()]
is_so = plain[0][:4] == [1, 2, 3, 5] and math.isnan(plain[1])
for in_order, median, greatest in others:
    is_so &= in_order[0] == 3 and in_order[2:] == [1, 2, 5] and median == 1 and math.isnan(greatest)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
