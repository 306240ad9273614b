#!/bin/bash
# Expected: np.save and np.load treat all types of ml_dtypes alike. They lose the type's name (bfloat16 comes back as V2), but
#   they keep the bytes, so `.view(...)` restores the array. What works with float8_e4m3fn works with float8_e5m2.
# Happens: float8_e5m2 says that it is of kind "f", all others say "V". So np.save writes "<f1" into the file, a type that
#   numpy does not have, and np.load refuses numpy's own file. np.savez does the same.
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

KINDS = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu", "float4_e2m1fn", "int4",
]


def comes_back(array):
    """Save and load the array, and return whether its bytes are the same, or the error."""
    np.save("array.npy", array)
    try:
        return np.load("array.npy").tobytes() == array.tobytes()
    except ValueError as error:
        return str(error)


print("ml_dtypes", ml_dtypes.__version__, "numpy", np.__version__)
results = {}
for name in KINDS:
    array = np.array([1, 2, 4], getattr(ml_dtypes, name))
    results[name] = comes_back(array)
    print(f"{name}: type in the file {array.dtype.str}, comes back: {results[name]}")
refused = {name for name, result in results.items() if result is not True}
is_so = refused == {"float8_e5m2"} and "<f1" in results["float8_e5m2"]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
