#!/bin/bash
# Expected: `fpzip.decompress(fpzip.compress(array))` "returns the original array", as zfpy does for any layout. Both calls have an
#   `order`, which should be the array's layout; a slice, which has neither layout, is right with both orders.
# Happens: a transposed array, with the default order "C", comes back with its values in other places, and so does an array of the
#   usual layout with order "F": the memory is read as if it had the layout that was named, without an error. The shape is
#   right but for the dimensions that are added up to four. Where the parameter came from, pull request 12, speaks of the ratio only.
# Versions: fpzip 1.2.5, zfpy 1.0.1.post0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install fpzip==1.2.5 zfpy==1.0.1.post0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import fpzip
import numpy as np
import zfpy

print("fpzip", version("fpzip"), "zfpy", version("zfpy"))
keys = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
seen = {}
for name, array in (("plain", keys), ("transposed", keys.T), ("sliced", keys[:, :, ::2])):
    for order in ("C", "F"):
        again = fpzip.decompress(fpzip.compress(array, order=order), order=order).reshape(array.shape)
        seen[name, order] = np.array_equal(again, array), np.array_equal(np.sort(again, axis=None), np.sort(array, axis=None))
        print(f"{name}, order {order}: the same array {seen[name, order][0]}, the same values in some place {seen[name, order][1]}")
    by_zfpy = zfpy.decompress_numpy(zfpy.compress_numpy(array))
    seen[name, "zfpy"] = np.array_equal(by_zfpy, array), True
    print(f"{name}, zfpy: the same array {seen[name, 'zfpy'][0]}")
wrong = {("plain", "F"), ("transposed", "C")}
is_so = all(same == (case not in wrong) and has_all for case, (same, has_all) in seen.items())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
