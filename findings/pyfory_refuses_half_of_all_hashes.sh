#!/bin/bash
# Expected: pyfory with `xlang=False` "can serialize any Python object", as pickle does. An unsigned hash of 64 bits, as vLLM's KV events and
#   xxhash have them, is an int.
# Happens: an int of 2^63 or more, half of all such hashes, is an OverflowError, also inside a list or a dict. So are objects that have one, such
#   as a UUID. A numpy array of uint64 comes back right.
# Versions: pyfory 1.7.7, numpy 2.4.6, xxhash 4.1.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pyfory==1.7.7 numpy==2.4.6 xxhash==4.1.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
import uuid
from importlib.metadata import version

import numpy as np
import pyfory
import xxhash

print("pyfory", version("pyfory"))
fory = pyfory.Fory(xlang=False, ref=True, strict=False)


def outcome(value):
    try:
        back = fory.loads(fory.dumps(value))
    except OverflowError as error:
        return str(error)
    return "the same" if np.array_equal(back, value) else "another value"


hashes = [xxhash.xxh3_64_intdigest(f"block-{number}".encode()) for number in range(1000)]
large = [number for number in hashes if number >= 2**63]
refused = [number for number in hashes if outcome(number) != "the same"]
seen = {
    "2^63 - 1": outcome(2**63 - 1),
    "2^63": outcome(2**63),
    "a list": outcome([1, 2**63]),
    "a UUID": outcome(uuid.UUID(int=2**63)),
    "an array": outcome(np.array(hashes, np.uint64)),
}
for name, text in seen.items():
    print(f"{name}: {text}")
print(f"of {len(hashes)} hashes, {len(refused)} are refused")
errors = ["Python int too large to convert to C long", "integer out of range for int64 fastpath"]
is_so = list(seen.values()) == ["the same", errors[0], errors[1], errors[0], "the same"] and refused == large and 400 < len(large) < 600
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
