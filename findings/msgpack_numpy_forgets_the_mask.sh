#!/bin/bash
# Expected: msgpack-numpy packs numpy's arrays, so that they come back with their type, shape and numbers, and leaves to msgpack what it
#   cannot pack, which is a TypeError. A masked array is an array some of whose numbers are not valid, with a mask that says which; pickle
#   keeps the mask.
# Happens: a masked array is packed as a plain array, and its mask is dropped without an error. What was masked, a measurement that failed
#   or a -1 for "none", comes back as a valid number, and the mean is another one.
# Versions: msgpack-numpy 0.4.8, msgpack 1.2.4, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install msgpack-numpy==0.4.8 msgpack==1.2.4 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import pickle
import sys
from importlib.metadata import version

import msgpack_numpy
import numpy as np

print("msgpack-numpy", version("msgpack-numpy"))
times = np.ma.masked_equal([1.0, 2.0, -1.0, 3.0], -1.0)
read, pickled = msgpack_numpy.unpackb(msgpack_numpy.packb(times)), pickle.loads(pickle.dumps(times))
print(f"written {times}, mean {times.mean()}; with pickle {pickled}, mean {pickled.mean()}; with msgpack-numpy {read}, mean {read.mean()}")
is_so = type(read) is np.ndarray and read.tolist() == [1, 2, -1, 3] and pickled.mean() == times.mean() == 2 and read.mean() == 1.25
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
