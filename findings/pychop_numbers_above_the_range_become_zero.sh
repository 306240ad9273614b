#!/bin/bash
# Expected: pychop's `Chop(exp_bits, sig_bits)` rounds numbers to a smaller floating-point format, with "IEEE 754 default" rounding if
#   nothing else is asked for. A number above the format's range is infinity then, as with numpy's float16, or the largest number.
# Happens: a number from the first power of two above the range to its double becomes 0: 70000 and 131000 in float16 (5, 10), 300 in
#   a float8 of (4, 3). From 131072 on it is infinity, and 65520 becomes 65536, which float16 does not have. Rounding up, down,
#   to zero and half to zero (modes 2, 3, 4 and 7) makes the same zeros, with and without subnormal numbers.
# Versions: pychop 0.6.2, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install --no-deps pychop==0.6.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from pychop import Chop

print("pychop", version("pychop"), "numpy", np.__version__)
NUMBERS = np.array([60000.0, 65504.0, 65520.0, 65536.0, 70000.0, -70000.0, 131000.0, 131072.0, 200000.0])
with np.errstate(over="ignore"):
    by_numpy = NUMBERS.astype(np.float16).astype(float)
by_pychop = {mode: Chop(5, 10, rmode=mode)(NUMBERS.copy()) for mode in (1, 2, 3, 4, 7)}
for number, ours, theirs in zip(NUMBERS, by_numpy, by_pychop[1], strict=True):
    print(f"{number:.0f} in float16: {ours:.0f} with numpy, {theirs:.0f} with pychop")
small = Chop(4, 3)(np.array([240.0, 300.0, 400.0, 511.0, 512.0]))
print("240, 300, 400, 511 and 512 in a float8 of (4, 3):", small)
is_so = by_numpy.tolist() == [60000, 65504] + [np.inf] * 3 + [-np.inf] + [np.inf] * 3
is_so &= by_pychop[1].tolist() == [60000, 65504, 65536, 0, 0, 0, 0, np.inf, np.inf]
is_so &= all((rounded[3:7] == 0).all() for rounded in (*by_pychop.values(), Chop(5, 10, subnormal=False)(NUMBERS.copy())))
is_so &= small.tolist() == [240, 0, 0, 0, np.inf]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
