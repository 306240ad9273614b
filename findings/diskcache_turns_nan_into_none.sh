#!/bin/bash
# Expected: a value that was stored comes back. diskcache stores floats as numbers of SQLite, and pickles what SQLite has no type for.
# Happens: float("nan") comes back as None, without an error, from the cache, from an Index and from a Deque. It is still a key of the
#   cache. Infinity and -0.0 come back right, and so does a list with a NaN, which is pickled. Known: the fork diskcache-community
#   keeps NaN since 5.8.2.
# Versions: diskcache 5.6.3, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install diskcache==5.6.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys

import diskcache

print("diskcache", diskcache.__version__)
cache = diskcache.Cache("cache")
seen = {}
for name, value in (("nan", float("nan")), ("infinity", float("inf")), ("-0.0", -0.0), ("list", [float("nan")])):
    cache[name] = value
    seen[name] = repr(cache[name])
    print(f"{name}: stored {value!r}, loaded {seen[name]}, is a key: {name in cache}")
index = diskcache.Index("index", {"nan": float("nan")})
deque = diskcache.Deque([float("nan")], "deque")
print("Index:", index["nan"], "Deque:", deque[0])
is_so = list(seen.values()) == ["None", "inf", "-0.0", "[nan]"] and "nan" in cache and index["nan"] is None and deque[0] is None
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
