#!/bin/bash
# Expected: numcodecs' BitRound, which drops bits of the mantissa, gives NaN for a NaN, as it does for numpy's, so that a check of the
#   stored array finds it. Only numbers are rounded.
# Happens: it adds half a unit to the bits, which carries through a mantissa full of ones. The NaN 0x7fffffff of float32, which is
#   CUDA's CUDART_NAN_F, becomes -0.0, and 0xffffffff becomes 0.0. A NaN with only low bits becomes infinity. A float16 of all ones becomes
#   zero as well, and so does one in a Zarr array with this filter.
# Versions: numcodecs 0.16.6, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install numcodecs==0.16.6 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import numcodecs
import numpy as np

print("numcodecs", numcodecs.__version__, "numpy", np.__version__)
codec = numcodecs.BitRound(keepbits=7)
seen = {}
for name, bits in (("numpy's NaN", 0x7FC00000), ("all ones, no sign", 0x7FFFFFFF), ("all ones", 0xFFFFFFFF), ("the lowest bit", 0x7F800001)):
    array = np.array([bits], np.uint32).view(np.float32)
    seen[name] = codec.decode(codec.encode(array)).view(np.float32)[0]
    print(f"{name}: {bits:#x} is {array[0]}, and {seen[name]} after BitRound")
is_so = np.isnan(seen["numpy's NaN"]) and seen["all ones, no sign"] == seen["all ones"] == 0 and np.isinf(seen["the lowest bit"])
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
