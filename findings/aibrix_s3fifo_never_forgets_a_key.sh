#!/bin/bash
# Expected: S3-FIFO remembers keys that it evicted in a ghost queue of bounded size, as long as the main queue: it is there to recognize what
#   comes back soon. A cache of a fixed capacity takes a fixed amount of memory.
# Happens: the ghost queue of AIBrix's S3FIFO, the default policy of its KV cache in the host's memory, is bounded by the bytes of its
#   entries, and those have none, because their values are gone. So it never drops a key. With room for 10 blocks, 5000 different blocks
#   leave 4990 ghosts with their tokens, and a block that comes back after any time goes straight to the main queue. FIFO and LRU keep 10
#   keys at most.
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

BLOCK, ROOM, NUMBER = 100, 10, 5000


class Block(MemoryRegion):
    def destroy_unsafe(self):
        pass


print("aibrix-kvcache", version("aibrix-kvcache"))
known = {}
for policy in (FIFO, LRU, S3FIFO):
    cache = policy(ROOM * BLOCK)
    for number in range(NUMBER):
        cache.put(KVCacheKey(None, TokenListView([number] * 16)), Block(None, 0, BLOCK))
    known[policy.__name__] = len(list(cache.keys())), len(cache._hashmap)
    print(f"{policy.__name__} with room for {ROOM} blocks, after {NUMBER}: {known[policy.__name__][0]} blocks, {known[policy.__name__][1]} keys")
is_so = all(known[name][1] <= ROOM for name in ("FIFO", "LRU")) and known["S3FIFO"] == (ROOM, NUMBER)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
