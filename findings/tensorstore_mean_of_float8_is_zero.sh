#!/bin/bash
# Expected: the mean, the min and the max of four times 7 are 7. The float8 types are tensorstore's own data types, and a type that
#   tensorstore.downsample cannot reduce is an error.
# Happens: the "mean" of any float8 array is 0, without an error. The "min" and "max" of float8_e4m3fn, a type
#   without infinities, are NaN. "median" is right, and so are all four with bfloat16.
# Versions: tensorstore 0.1.86, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tensorstore==0.1.86 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import ml_dtypes
import numpy as np
import tensorstore

print("tensorstore", version("tensorstore"), "ml_dtypes", ml_dtypes.__version__)
seen = {}
for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    array = tensorstore.array(np.full(4, 7, kind))
    seen[kind.__name__] = [float(tensorstore.downsample(array, [4], method).read().result()[0]) for method in ("mean", "median", "min", "max")]
    print("{}: four times 7 have the mean {:g}, the median {:g}, the min {:g}, the max {:g}".format(kind.__name__, *seen[kind.__name__]))
is_so = seen["bfloat16"] == [7, 7, 7, 7] and seen["float8_e5m2"] == [0, 7, 7, 7]
is_so = is_so and seen["float8_e4m3fn"][:2] == [0, 7] and np.isnan(seen["float8_e4m3fn"][2:]).all()
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
