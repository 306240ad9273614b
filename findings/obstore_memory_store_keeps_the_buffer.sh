#!/bin/bash
# Expected: after `put` returned, the caller may use the buffer again: the store has the bytes, as a LocalStore and an S3Store
#   have them, and an object never changes without another `put`. The documentation of `put` takes bytearrays and numpy
#   arrays, and says nothing else.
# Happens: a MemoryStore keeps the buffer itself. What the caller writes into it later is in the object, under the same e_tag.
#   So a test with a MemoryStore sees corruption that no other store has, or an update that was never stored.
# Versions: obstore 0.12.1, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install obstore==0.12.1 numpy==2.4.6
cd "$folder"
mkdir objects
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
import obstore
from obstore.store import LocalStore, MemoryStore

print("obstore", version("obstore"))
seen = {}
for store in (LocalStore("objects"), MemoryStore()):
    for buffer in (bytearray(b"stored"), np.frombuffer(b"stored", np.uint8).copy()):
        obstore.put(store, "key", buffer)
        before = obstore.head(store, "key")["e_tag"]
        buffer[:] = memoryview(b"reused") if isinstance(buffer, bytearray) else np.frombuffer(b"reused", np.uint8)
        has_same_tag = obstore.head(store, "key")["e_tag"] == before
        name = type(store).__name__, type(buffer).__name__
        seen[name] = bytes(obstore.get(store, "key").bytes()), has_same_tag
        print(f"{name[0]}, {name[1]}: put b'stored', now {seen[name][0]}, same e_tag: {has_same_tag}")
is_so = seen == {
    ("LocalStore", "bytearray"): (b"stored", True),
    ("LocalStore", "ndarray"): (b"stored", True),
    ("MemoryStore", "bytearray"): (b"reused", True),
    ("MemoryStore", "ndarray"): (b"reused", True),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
