#!/bin/bash
# Expected: blosc2's `mean` is numpy's, to which its documentation refers: the sum of integers is made in float64, so that it
#   cannot wrap. The mean of two numbers, both 2^63, is 2^63.
# Happens: the integers are added up as 64-bit integers first. The sum wraps, here to 0, and the mean is 0, without a warning. The
#   mean of four times 2^62 (int64) is 0 as well. `std` and `var` are made from that mean: those of equal numbers are not 0.
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
seen = {}
for name, numbers in (("uint64", np.full(2, 2**63, np.uint64)), ("int64", np.full(4, 2**62, np.int64))):
    packed = blosc2.asarray(numbers)
    seen[name] = float(numbers.mean()), float(packed.mean()), float(numbers.std()), float(packed.std())
    print("{}: mean {:g} with numpy, {:g} with blosc2; std {:g} and {:g}".format(name, *seen[name]))
is_so = seen["uint64"][:2] == (2.0**63, 0) and seen["int64"][:2] == (2.0**62, 0) and seen["uint64"][3] != 0
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
