#!/bin/bash
# Expected: an AIBrix cache with a capacity of four blocks holds the four latest ones (FIFO, LRU) at any time: a fifth one evicts one. A block
#   for which `put` returned OK is there.
# Happens: each eviction makes room for one byte more than is needed, and so for a whole block. The fifth block evicts two, and the cache holds
#   three and four blocks in turns. With a capacity of one block, each second `put` returns OK and evicts what it has just put.
# Versions: aibrix-kvcache 0.8.0 without torch (the policies do not need it), numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install numpy==2.4.6 cityhash==0.4.10 sortedcontainers==2.4.0 tqdm==4.70.1
"$folder/venv/bin/pip" --quiet install --no-deps aibrix-kvcache==0.8.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
import types
from importlib.metadata import version
from importlib.util import find_spec
from unittest import mock

# the package imports torch and much else; its eviction policies call none of it
sys.modules["torch"] = mock.MagicMock()
(place,) = find_spec("aibrix_kvcache").submodule_search_locations
for name in ("aibrix_kvcache", "aibrix_kvcache.l1"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = ["/".join([place, *name.split(".")[1:]])]

from aibrix_kvcache.cache_hashable import KVCacheKey, TokenListView
from aibrix_kvcache.l1.eviction_policy import FIFO, LRU, S3FIFO
from aibrix_kvcache.memory import MemoryRegion

BLOCK, NUMBER = 100, 10


class Block(MemoryRegion):
    def destroy_unsafe(self):
        pass


print("aibrix-kvcache", version("aibrix-kvcache"))
held, last = {}, {}
for policy in (FIFO, LRU, S3FIFO):
    for room in (1, 4):
        cache = policy(room * BLOCK)
        held[policy.__name__, room], last[policy.__name__, room] = [], []
        for number in range(NUMBER):
            key = KVCacheKey(None, TokenListView([number] * 16))
            assert cache.put(key, Block(None, 0, BLOCK)).is_ok()
            held[policy.__name__, room].append(len(list(cache.keys())))
            last[policy.__name__, room].append(key in cache)
        lost = last[policy.__name__, room].count(False)
        print(f"{policy.__name__} with room for {room}, blocks after each put: {held[policy.__name__, room]}, lost at once: {lost}")
is_so = all(numbers == ([1, 0] * 5 if room == 1 else [1, 2, 3] + [4, 3] * 3 + [4]) for (_, room), numbers in held.items())
is_so &= all(found == ([True, False] * 5 if room == 1 else [True] * NUMBER) for (_, room), found in last.items())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
