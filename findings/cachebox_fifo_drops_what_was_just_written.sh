#!/bin/bash
# Expected: after `cache[key] = value` without an error, the cache has the value: room is made with other entries. cachebox
#   raises an OverflowError for a value that can never fit.
# Happens: a FIFOCache with `getsizeof` evicts the oldest entry, also if that is the very one which is written. When the oldest
#   block grows from 5 to 8 bytes of 10, it is gone, old value and new, and the other one stays. LRUCache and LFUCache
#   evict the other one, as cachetools' FIFOCache does.
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
caches = [kind(10, getsizeof=lambda key, value: len(value)) for kind in (cachebox.FIFOCache, cachebox.LRUCache, cachebox.LFUCache)]
seen = []
for cache in (*caches, cachetools.FIFOCache(10, getsizeof=len)):
    cache["a"] = b"12345"
    cache["b"] = b"1234"
    cache["a"] = b"12345678"
    seen.append(dict(cache.items()))
    print(f"{type(cache).__module__}.{type(cache).__name__}: after a was written, {seen[-1]}")
is_so = seen[0] == {"b": b"1234"} and seen[1:] == [{"a": b"12345678"}] * 3
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
