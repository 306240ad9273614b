#!/bin/bash
# Expected: prefixlens tells why blocks were missed. By its description `unique_content_ratio` is 0 if all misses at a position had the
#   same tokens, which means that the cache is too small, and 1 if all differed, which means that something like a time or an
#   id stands in the prompt.
# Happens: it is the number of different contents divided by the number of misses, which is never 0. Two misses of the same tokens
#   are "50.0% unique - mixed content", and the first prompt of a tenant, the only one that missed, is "100.0% unique -
#   unique content per request". From four misses on, equal ones are called thrashing.
# Versions: prefixlens 0.1.0, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install prefixlens==0.1.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version

from prefixlens import RadixCacheSimulator, Request

print("prefixlens", version("prefixlens"))
ratios = []
for misses in range(1, 6):
    simulator = RadixCacheSimulator(block_size=16, capacity_blocks=2)
    for number in range(misses):
        for tenant, first in (("one", 100), ("other", 200)):
            simulator.process(Request(f"{tenant}-{number}", tuple(range(first, first + 32)), (("tenant", tenant),)))
    (position,) = simulator.report().by_tag_divergence["tenant"]["one"]
    ratios.append((position.miss_count, position.unique_content_ratio))
    print(f"{position.miss_count} misses of the same prompt, thrown out in between: unique content {position.unique_content_ratio:.2f}")
with open("requests.jsonl", "w") as requests:
    for number in range(3):
        requests.write(json.dumps({"request_id": str(number), "tenant": "one", "token_ids": list(range(64))}) + "\n")
command = ["venv/bin/prefixlens", "analyze", "requests.jsonl", "--block-size", "16", "--capacity-blocks", "100"]
answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
last = answer.strip().splitlines()[-1]
print("the same prompt three times in a large cache:", ascii(last.strip()))
is_so = ratios == [(misses, 1 / misses) for misses in range(1, 6)]
is_so &= "1 miss" in last and "100.0% unique" in last and "unique content per request" in last
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
