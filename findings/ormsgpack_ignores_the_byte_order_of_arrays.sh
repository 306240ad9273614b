#!/bin/bash
# Expected: ormsgpack with OPT_SERIALIZE_NUMPY packs an array's numbers, or refuses an array that it cannot read, as it does
#   for those that are not contiguous. Big-endian arrays are what `np.frombuffer(data, ">i8")` makes of a network's bytes, such
#   as the sequence numbers of vLLM's KV events.
# Happens: it ignores the byte order of the dtype. A big-endian 1 is packed as 72057594037927936, and 1.0 as 3.03865e-319,
#   without an error. A single element of such an array, np.int64, is right. orjson had the same fault (its issue 472) and
#   now refuses such arrays.
# Versions: ormsgpack 1.13.1, msgpack 1.2.4, numpy 2.4.6, Python 3.11, on a little-endian machine.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ormsgpack==1.13.1 msgpack==1.2.4 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import msgpack
import numpy as np
import ormsgpack


def packed_and_read(value):
    return msgpack.unpackb(ormsgpack.packb(value, option=ormsgpack.OPT_SERIALIZE_NUMPY))


print("ormsgpack", version("ormsgpack"), "numpy", np.__version__)
seen = {}
for kind in ("<i8", ">i8", "<f8", ">f8"):
    array = np.array([1, 2], kind)
    seen[kind] = packed_and_read(array)
    print(f"{kind}: numpy has {array.tolist()}, packed was {seen[kind]}")
first = packed_and_read(np.array([1, 2], ">i8")[0])
print("the first element of the array with >i8, packed alone:", first)
right = seen["<i8"] == [1, 2] and seen["<f8"] == [1.0, 2.0] and first == 1
is_so = right and seen[">i8"] == [1 << 56, 2 << 56] and max(seen[">f8"]) < 1e-300
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
