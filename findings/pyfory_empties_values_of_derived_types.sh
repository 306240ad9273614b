#!/bin/bash
# Expected: pyfory, Apache Fory for Python, "offers the same object surface as pickle/cloudpickle" and "can serialize any Python object" with
#   `xlang=False` and `strict=False`. What it cannot serialize is an error.
# Happens: a value of a class that is derived from str, bytes, int, float or tuple comes back as an empty one of that class: "", b"", 0, 0.0 or
#   (), without an error, and a complex number as 0j. Those derived from list and dict come back right, and so does all with pickle.
# Versions: pyfory 1.7.7, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pyfory==1.7.7
cd "$folder"
venv/bin/python - <<'PYTHON'
import pickle
import sys
from importlib.metadata import version

import pyfory


class Key(str):
    pass


class Digest(bytes):
    pass


class BlockId(int):
    pass


class Seconds(float):
    pass


class Shape(tuple):
    pass


class Blocks(list):
    pass


VALUES = [Key("block-1"), Digest(b"\xc0\xff\xee"), BlockId(7), Seconds(1.5), Shape((2, 3)), 1 + 2j, Blocks([7])]
print("pyfory", version("pyfory"))
fory = pyfory.Fory(xlang=False, ref=True, strict=False)
seen = []
for value in VALUES:
    back, pickled = fory.loads(fory.dumps(value)), pickle.loads(pickle.dumps(value))
    assert type(back) is type(pickled) is type(value)
    assert pickled == value
    seen.append(back)
    print(f"{type(value).__name__} {value!r} comes back as {back!r}")
is_so = seen == ["", b"", 0, 0.0, (), 0j, [7]]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
