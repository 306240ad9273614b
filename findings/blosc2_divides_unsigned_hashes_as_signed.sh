#!/bin/bash
# Expected: an expression over a blosc2 array of uint64 has numpy's values, and the type of the result, uint64, says that they are
#   unsigned. So `hashes >> 60` is a shard from 0 to 15, and `hashes % 7` the same of seven workers as with numpy.
# Happens: `>>`, `%` and `//` treat the numbers as signed ones. For hashes of 2^63 or more, half of all, `>> 60` is near 2^64, half
#   of a hash is larger than the hash, and the remainder is another one than numpy's. All are in an array of uint64.
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
hashes = np.array([7, 2**63 + 3], np.uint64)
packed = blosc2.asarray(hashes)
seen = []
for name, here, there in (
    (">> 60", hashes >> np.uint64(60), packed >> 60),
    ("% 7", hashes % np.uint64(7), packed % 7),
    ("// 2", hashes // np.uint64(2), packed // 2),
):
    result = there[:]
    seen.append((here.tolist() == result.tolist(), here[0] == result[0], result.dtype.name))
    print(f"hashes {name}: numpy {here.tolist()}, blosc2 {result.tolist()} ({result.dtype.name})")
is_so = seen == [(False, True, "uint64")] * 3
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
