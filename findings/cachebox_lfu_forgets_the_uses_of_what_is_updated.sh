#!/bin/bash
# Expected: cachebox's LFUCache evicts "the item with the lowest access count", and its documentation says that "frequency counters
#   accumulate indefinitely" and that only "freshly inserted keys" begin anew. So the block that is used most stays, whether or not
#   its value is replaced, as with cachetools' LFUCache.
# Happens: writing a new value for a key sets its count to 0. The most used block, written back once, is the next to be evicted.
# Versions: cachebox 6.2.10, cachetools 8.0.2, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install cachebox==6.2.10 cachetools==8.0.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import cachebox
import cachetools

print("cachebox", version("cachebox"), "cachetools", version("cachetools"))
seen = {}
for module in (cachebox, cachetools):
    for is_updated in (False, True):
        cache = module.LFUCache(3)
        for key, uses in (("hot", 100), ("b", 2), ("c", 3)):
            cache[key] = "value"
            for _ in range(uses):
                cache[key]
        if is_updated:
            cache["hot"] = "new value"
        cache["d"] = "value"
        seen[module.__name__, is_updated] = sorted(cache)
        print(f"{module.__name__}: 'hot' was used 100 times, and {'updated' if is_updated else 'not updated'}: {sorted(cache)} stay")
is_so = [key for key, keys in seen.items() if "hot" not in keys] == [("cachebox", True)]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
