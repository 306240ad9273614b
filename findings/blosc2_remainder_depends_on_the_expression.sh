#!/bin/bash
# Expected: `a % 3` has one value, wherever it stands. blosc2's documentation of `remainder` says which: it "is equivalent to the
#   Python modulus operator x1_i % x2_i". So -7 % 3 is 2, a slot of a ring with 3 slots.
# Happens: `a % 3` and `remainder` give -1, as C does, and `a % 3 + 0` too. With a `//` anywhere in the same expression, here one
#   times 0, `a % 3` gives 2. The same with floats. That C's sign comes out is known of numexpr (pydata/numexpr issue 365).
# Versions: blosc2 4.14.1, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install blosc2==4.14.1 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import blosc2
import numpy as np

print("blosc2", blosc2.__version__, "numpy", np.__version__)
is_so = True
for kind in (int, float):
    numbers = np.array([-7, 7], kind)
    packed = blosc2.asarray(numbers)
    alone = (packed % 3)[:].tolist()
    named = blosc2.remainder(packed, 3)[:].tolist()
    plus = (packed % 3 + 0)[:].tolist()
    beside = (packed % 3 + packed // 3 * 0)[:].tolist()
    print(f"{numbers.tolist()} % 3: numpy {(numbers % 3).tolist()}, blosc2 {alone}, remainder {named}, + 0 {plus}, + a // 3 * 0 {beside}")
    is_so = is_so and alone == named == plus == [-1, 1] and beside == [2, 1]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
