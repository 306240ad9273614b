#!/bin/bash
# Expected: `rename(store, "a", "a")` does nothing, as os.rename and POSIX have it, or is an error. What a test sees with a
#   MemoryStore holds for the other stores.
# Happens: a LocalStore keeps the object. A MemoryStore returns without an error, and the object is gone: a rename is a copy,
#   which here changes nothing, and then a deletion of the source.
# Versions: obstore 0.12.1, Python 3.11. The servers of S3 that refuse a copy onto itself make the S3Store's rename an error.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install obstore==0.12.1
cd "$folder"
mkdir objects
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import obstore
from obstore.store import LocalStore, MemoryStore

print("obstore", version("obstore"))
left = {}
for store in (LocalStore("objects"), MemoryStore()):
    obstore.put(store, "a", b"data")
    obstore.rename(store, "a", "a")
    name = type(store).__name__
    left[name] = [entry["path"] for page in obstore.list(store) for entry in page]
    print(f"{name}: after the rename there are {left[name]}")
is_so = left == {"LocalStore": ["a"], "MemoryStore": []}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
