#!/bin/bash
# Expected: in apytypes, `from_float` and `cast` both round to a floating-point format, to the nearest number and ties to even if nothing else
#   is asked for. A number of the wider format is the same number for both, and for ml_dtypes.
# Happens: numbers just below the smallest normal number, which round up to it, become 0 with `cast`: 5.6e-5, a float16, in a
#   float8 of (5, 2), whose smallest normal number is 6.1e-5 and whose spacing there is 1.5e-5. `from_float` gives 6.1e-5, as ml_dtypes
#   does. It is so for every format tried, in arrays and single numbers. Between fixed-point numbers and `from_float` the same
#   was mended: apytypes/apytypes issue 671.
# Versions: apytypes 0.5.1, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apytypes==0.5.1 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import ml_dtypes
import numpy as np
from apytypes import APyFloat, APyFloatArray

print("apytypes", version("apytypes"), "ml_dtypes", ml_dtypes.__version__)
is_so = True
FORMATS = (("float16", 5, 10, np.float16), ("float8", 5, 2, ml_dtypes.float8_e5m2), ("float8", 4, 3, ml_dtypes.float8_e4m3))
for name, exponent, mantissa, dtype in FORMATS:
    smallest = 2.0 ** (2 - 2 ** (exponent - 1))
    wide = APyFloatArray.from_float(np.linspace(smallest * (1 - 2.0**-mantissa), smallest, 1001), 8, 23)
    numbers = wide.to_numpy()
    cast = wide.cast(exponent, mantissa).to_numpy()
    singly = np.array([float(number.cast(exponent, mantissa)) for number in wide])
    direct = APyFloatArray.from_float(numbers, exponent, mantissa).to_numpy()
    other = cast != direct
    print(f"{name} of ({exponent}, {mantissa}), smallest normal number {smallest:.4g}: {other.sum()} of {len(numbers)} numbers differ,"
          f" from {numbers[other].min():.6g} to {numbers[other].max():.6g};"
          f" cast {set(cast[other].tolist())}, from_float {set(direct[other].tolist())}")
    is_so &= other.sum() > 300 and (cast[other] == 0).all() and (direct[other] == smallest).all()
    is_so &= (cast == singly).all() and (direct == numbers.astype(np.float32).astype(dtype).astype(float)).all()
half = APyFloat.from_float(5.6e-5, 5, 10)
seen = float(half.cast(5, 2)), float(APyFloat.from_float(float(half), 5, 2))
print(f"{float(half):.4g} as a float16 in a float8 of (5, 2): {seen[0]:.4g} with cast, {seen[1]:.4g} with from_float")
is_so &= seen == (0, 2.0**-14)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
