#!/bin/bash
# Expected: CLOCK-Pro fills the cache before it evicts, and how much of it is for cold blocks adapts to the requests: that is its point, and
#   libcachesim's `init_ratio_cold` (0.5) is, by its name, where this begins. 100 blocks fit in a cache for 100.
# Happens: the cache holds 50 of 100 blocks, however long it runs, and over 100 blocks in turn, which would all fit, more than half
#   of the requests of ten rounds are misses; LRU, FIFO and ARC miss each block once. On skewed requests it misses more than FIFO. The pull
#   request that brought it says that it misses slightly more than CLOCK in small caches: 1a1a11a/libCacheSim pull request 129.
# Versions: libcachesim 0.3.5, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install --no-deps numpy==2.4.6 libcachesim==0.3.5
cd "$folder"
venv/bin/python - <<'PYTHON'
import random
import sys
from importlib.metadata import version

import libcachesim

CAPACITY = 100


def replay(kind, blocks):
    cache = kind(CAPACITY)
    misses = most = 0
    for time, block in enumerate(blocks):
        request = libcachesim.Request()
        request.obj_id, request.obj_size, request.clock_time = block, 1, time
        misses += not cache.get(request)
        most = max(most, cache.get_n_obj())
    return misses / len(blocks), most


print("libcachesim", version("libcachesim"))
source = random.Random(1)
in_turn = list(range(CAPACITY)) * 10
skewed = [int(source.paretovariate(0.6)) % 500 for _ in range(20_000)]
seen = {}
for kind in (libcachesim.ClockPro, libcachesim.Clock, libcachesim.LRU, libcachesim.FIFO, libcachesim.ARC):
    (in_turn_ratio, _), (skewed_ratio, most) = replay(kind, in_turn), replay(kind, skewed)
    seen[kind.__name__] = in_turn_ratio, skewed_ratio, most
    print(f"{kind.__name__}: miss ratio {in_turn_ratio:.2f} in turn, {skewed_ratio:.3f} skewed, at most {most} of {CAPACITY} blocks")
of_clock_pro = seen.pop("ClockPro")
is_so = of_clock_pro[0] > 0.5 and of_clock_pro[2] == CAPACITY // 2
is_so &= all(ratio == 0.1 and most == CAPACITY and skewed < of_clock_pro[1] for ratio, skewed, most in seen.values())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
