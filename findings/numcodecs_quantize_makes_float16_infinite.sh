#!/bin/bash
# Expected: numcodecs' Quantize rounds numbers to so many decimal digits and takes any floating point type, float16 too. The numbers
#   that come back differ from the old ones by less than the last digit.
# Happens: it multiplies and divides by a power of two in the array's own type. In float16, 1000 with 2 digits and 5 with 4 digits
#   come back as infinity, with no more than numpy's warning of an overflow. With `astype` float32 or float64, which
#   is the type of what is stored, it is the same.
# Versions: numcodecs 0.16.6, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install numcodecs==0.16.6 numpy==2.4.6
cd "$folder"
venv/bin/python -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from numcodecs import Quantize

print("numcodecs", version("numcodecs"), "numpy", np.__version__)
NUMBERS = [0.5, 2, 5, 100, 1000]


def stored(digits, dtype, **options):
    codec = Quantize(digits, dtype, **options)
    seen = np.frombuffer(codec.decode(codec.encode(np.array(NUMBERS, dtype))), dtype).tolist()
    print(f"{digits} digits, {dtype} {options or ''}: {seen}")
    return seen


print("numbers:", NUMBERS)
inf = float("inf")
is_so = (
    stored(2, "float32") == NUMBERS
    and stored(4, "float32") == NUMBERS
    and stored(2, "float16") == [0.5, 2, 5, 100, inf]
    and stored(4, "float16") == [0.5, 2, inf, inf, inf]
    and stored(4, "float16", astype="float32") == [0.5, 2, inf, inf, inf]
)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
