#!/bin/bash
# Expected: libcachesim's WTinyLFU has a window of 1 % of the cache and keeps the rest for what was used often. A working set that fits in
#   the cache is missed once: with 100 blocks in a cache for 100 blocks, one request in ten of ten rounds is a miss.
# Happens: what is larger than the window never enters the cache, without an error or a line in the log. With 50 blocks in a cache for 50, or in
#   one for 99, every request is a miss, forever, and the cache stays empty. LRU, ARC and Sieve miss each block once. The documentation
#   of `window_size` names a ratio between 0 and 1 only, and nothing about the size of objects. Caffeine lets such an entry compete for the
#   main cache (ben-manes/caffeine issue 1757).
# Versions: libcachesim 0.3.5, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install --no-deps numpy==2.4.6 libcachesim==0.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import libcachesim

BLOCK = 2 << 20
ROUNDS = 10


def miss_ratio(kind, capacity, number):
    cache = kind(capacity * BLOCK)
    misses = 0
    for time in range(ROUNDS * number):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = time % number, BLOCK, time
        misses += not cache.get(request)
    return misses / (ROUNDS * number), cache.get_n_obj()


print("libcachesim", version("libcachesim"))
seen = {}
for kind in (libcachesim.WTinyLFU, libcachesim.LRU, libcachesim.ARC, libcachesim.Sieve):
    for capacity, number in ((100, 100), (99, 50), (50, 50)):
        seen[kind.__name__, capacity] = ratio, kept = miss_ratio(kind, capacity, number)
        print(f"{kind.__name__}: {ROUNDS} rounds over {number} blocks, cache for {capacity}: miss ratio {ratio:.2f}, {kept} blocks kept")
of_w_tinylfu = [seen.pop(("WTinyLFU", capacity)) for capacity in (100, 99, 50)]
is_so = of_w_tinylfu == [(0.1, 100), (1, 0), (1, 0)] and all(ratio == 0.1 for ratio, _ in seen.values())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
