#!/bin/bash
# Expected: in apytypes, arrays are compared element by element, and an element of an APyFloatArray is an APyFloat. Infinity is equal to
#   infinity, so that an array without NaN is equal to itself: for APyFloat, ml_dtypes and numpy it is.
# Happens: in arrays, infinity is not equal to infinity but greater, and minus infinity is greater than minus infinity, with arrays and
#   with a single number. A search for the overflows (`array == infinity`) finds none, and counts of what is above the largest
#   infinity are more than 0.
# Versions: apytypes 0.5.1, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install apytypes==0.5.1 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import operator
import sys
from importlib.metadata import version

import ml_dtypes
import numpy as np
from apytypes import APyFloat, APyFloatArray

print("apytypes", version("apytypes"), "ml_dtypes", ml_dtypes.__version__)
NUMBERS = [1.0, 1e6, float("inf"), -float("inf")]
array = APyFloatArray.from_float(NUMBERS, 5, 2)
by_ml_dtypes = np.array(NUMBERS).astype(ml_dtypes.float8_e5m2)
infinity = APyFloat.from_float(float("inf"), 5, 2)
seen = {}
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    compare = getattr(operator, name)
    seen[name] = [
        compare(array, array).tolist(),
        [bool(compare(element, element)) for element in array],
        compare(by_ml_dtypes, by_ml_dtypes).tolist(),
        compare(array, infinity).tolist(),
        [bool(compare(element, infinity)) for element in array],
    ]
    print(f"{array.to_numpy()} {name} itself: {seen[name][0]} as an array, {seen[name][1]} singly, {seen[name][2]} with ml_dtypes")
print(f"== infinity: {seen['eq'][3]} as an array, {seen['eq'][4]} singly")
wrong = {"eq": False, "ne": True, "lt": False, "le": False, "gt": True, "ge": True}
is_so = all(as_array == [singly[0]] + [wrong[name]] * 3 for name, (as_array, singly, *_) in seen.items())
is_so &= all(singly == theirs for _, singly, theirs, *_ in seen.values())
is_so &= seen["eq"][3] == [False] * 4 and seen["eq"][4] == [False, True, True, False]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
