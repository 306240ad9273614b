#!/bin/bash
# Expected: operators of ml_dtypes' uint4, the unsigned 4-bit integer, give uint4, as numpy's operators of uint8 give uint8: `~1` is 14, the
#   other four bits, `3 << 3` is 8, and `-2` is 14. `+`, `*` and `//` do so and wrap at 16.
# Happens: the operators on bits, the unary minus, and np.minimum and np.maximum give int8, a signed type, without a warning. So `~1` of a
#   uint4 is -2, `3 << 3` is 24 and `-2` is -2. `~mask == complement` is false for each mask. int4 becomes int8 too, so that
#   what is shifted out of it stays.
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

OPERATIONS = {
    "~1": lambda one, two, three: ~one,
    "-2": lambda one, two, three: -two,
    "3 << 3": lambda one, two, three: three << three,
    "1 | 2": lambda one, two, three: one | two,
    "minimum of 1 and 2": lambda one, two, three: np.minimum(one, two),
    "1 - 2": lambda one, two, three: one - two,
}
print("ml_dtypes", ml_dtypes.__version__)
seen = {}
for kind in (np.uint8, ml_dtypes.uint4, ml_dtypes.int4):
    numbers = [np.array([number], kind) for number in (1, 2, 3)]
    for name, operation in OPERATIONS.items():
        result = operation(*numbers)
        seen[kind.__name__, name] = result.dtype.name, int(result[0])
        print(f"{kind.__name__}: {name} is {result[0]}, of type {result.dtype.name}")
kept = {key for key, (name, _) in seen.items() if name == key[0]}
is_so = kept == {("uint8", name) for name in OPERATIONS} | {("uint4", "1 - 2"), ("int4", "1 - 2")}
is_so &= {name for name, _ in seen.values()} == {"uint8", "uint4", "int4", "int8"}
is_so &= [seen["uint4", name][1] for name in OPERATIONS] == [-2, -2, 24, 3, 1, 15]
is_so &= [seen["int4", name][1] for name in OPERATIONS] == [-2, -2, 24, 3, 1, -1]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
