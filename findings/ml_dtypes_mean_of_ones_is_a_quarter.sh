#!/bin/bash
# Expected: the mean of a thousand ones is 1. numpy's documentation of `mean` promises sums in float32 for float16, and the
#   coarser bfloat16 and float8 need them more.
# Happens: they are added up in their own type, where 256 + 1 is 256 (bfloat16) and 16 + 1 is 16 (float8_e4m3fn). So the mean
#   of ones is 0.256 and 0.016, without a warning. `dtype=np.float32` helps.
# Versions: ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import ml_dtypes
import numpy as np

print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
seen = {}
for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    ones = np.ones(1000, kind)
    plain, wide = float(ones.mean()), float(ones.mean(dtype=np.float32))
    seen[ones.dtype.name] = round(plain, 3), wide
    print(f"{ones.dtype.name}: sum {ones.sum()}, mean {plain:.3f}, mean with dtype=np.float32 {wide:.3f}")
is_so = seen == {"float16": (1, 1), "bfloat16": (0.256, 1), "float8_e4m3fn": (0.016, 1)}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
