#!/bin/bash
# Expected: mlx's `to_fp8` gives E4M3, a format that has a NaN, and `from_fp8` reads it as NaN, so that a NaN is still one after both, as
#   with ml_dtypes' float8_e4m3fn. Or `to_fp8` refuses it.
# Happens: `to_fp8` gives the greatest number of the format, 448, for NaN, as for infinity and all that is too large. A check for NaN
#   finds nothing in a cache or a file of float8 numbers. The other direction was fixed: mlx issue 4135, where `from_fp8` read
#   NaN as 480.
# Versions: mlx 0.32.4 with mlx-cpu 0.32.4, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install "mlx[cpu]==0.32.4" ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import ml_dtypes
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
NUMBERS = np.array([1.5, 448, np.nan, -np.nan], np.float32)
print("mlx", version("mlx"))
bytes_of_mlx = np.array(mx.to_fp8(mx.array(NUMBERS)))
bytes_of_others = NUMBERS.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
read = np.array(mx.from_fp8(mx.array(bytes_of_mlx), dtype=mx.float32))
read_of_others = np.array(mx.from_fp8(mx.array(bytes_of_others), dtype=mx.float32))
for number, byte, back, other_byte, other in zip(NUMBERS, bytes_of_mlx, read, bytes_of_others, read_of_others):
    print(f"{number}: mlx writes {byte:#04x} and reads {back}, ml_dtypes writes {other_byte:#04x}, which mlx reads as {other}")
is_so = np.array_equal(read[:2], NUMBERS[:2]) and np.abs(read[2:]).tolist() == [448, 448]
is_so &= np.array_equal(read_of_others, NUMBERS, equal_nan=True)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
