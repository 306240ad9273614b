#!/bin/bash
# Expected: `stats()` of a theine cache tells how many requests and hits there were. Reading it changes nothing, so that an exporter
#   can read it every few seconds, and what it says after a minute without requests is what it said before.
# Happens: each call counts one more hit and one more miss for each of the cache's shards, which are 16 or more. After a thousand hits and
#   no miss, `hit_rate` is 1.0 in the first call, falls with each further one, and approaches 0.5.
# Versions: theine 2.0.0, theine-core 2.1.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install theine==2.0.0 theine-core==2.1.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from theine import Cache

print("theine", version("theine"))
cache = Cache(10_000)
cache.set("block", "bytes")
for _ in range(1000):
    cache.get("block")
seen = []
for call in range(1, 101):
    stats = cache.stats()
    seen.append((stats.request_count, stats.hit_count, stats.hit_rate))
    if call in (1, 2, 3, 100):
        print("call {} of stats: {} requests, {} hits, rate {:.3f}".format(call, *seen[-1]))
is_so = seen[0] == (1000, 1000, 1.0) and seen[-1][0] > 3000 and seen[-1][2] < 0.8
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
