#!/bin/bash
# Expected: obstore's `delete` takes a list of objects. Its documentation says that an object which does not exist may be an error in some
#   stores, and none in others. Either way the other objects of the list are deleted.
# Happens: LocalStore raises at the first missing object and leaves the rest of the list. Of 100 objects behind a missing one, at
#   most a few are deleted, those that were under way at the same time. MemoryStore deletes all 100.
# Versions: obstore 0.12.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install obstore==0.12.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version
from pathlib import Path

import obstore
from obstore.store import LocalStore, MemoryStore

KEYS = [f"block-{number}" for number in range(100)]
print("obstore", version("obstore"))
Path("store").mkdir()
seen = []
for store in (LocalStore("store"), MemoryStore()):
    for key in KEYS:
        obstore.put(store, key, b"data")
    try:
        obstore.delete(store, ["missing", *KEYS])
        outcome = "no error"
    except FileNotFoundError as error:
        outcome = type(error).__name__
    left = sum(len(batch) for batch in obstore.list(store))
    seen.append((outcome, left))
    print(f"{type(store).__name__}: {outcome}, {left} of {len(KEYS)} objects are left")
is_so = seen[0][0] == "FileNotFoundError" and seen[0][1] > 50 and seen[1] == ("no error", 0)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
