#!/bin/bash
# Expected: kvcache-simulator takes each request's `input_length`, its "prefill input token count", into the hit rate, and a
#   speedup of 1.0 means "no-cache prefill throughput where every prefill input token is computed". Traces of engines that hash complete
#   blocks only, as vLLM does, have requests with 127 tokens and one hash for the first 64. A hit saves half of such a request at most.
# Happens: tokens without a hash are dropped. The average input is 64 tokens instead of 127, the hit rate is 100% and the speedup
#   a thousand. The same trace with a hash for each incomplete block gives the right average.
# Versions: kvcache-simulator 0.1.3 (backend python), Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install kvcache-simulator==0.1.3
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from importlib.metadata import version

print("kvcache-simulator", version("kvcache-simulator"))
command = ["venv/bin/kvcache-simulator", "run", "--trace", "trace.jsonl", "--model", "glm-5.2", "--backend", "python"]
options = ["--format", "json", "--no-progress", "--policies", "lru", "--budgets-gib", "0.012"]
seen = {}
for name, extra in (("complete blocks", False), ("all blocks", True)):
    with open("trace.jsonl", "w") as trace:
        for number in range(40):
            hashes = [number % 2, 100 + number] if extra else [number % 2]
            trace.write(json.dumps({"block_size": 64, "hash_ids": hashes, "input_length": 127}) + "\n")
    answer = json.loads(subprocess.run([*command, *options], stdout=subprocess.PIPE, check=True).stdout)
    result = answer["points"][0]["results"]["lru"] if answer["points"] else {"hitRate": None, "idealPrefillSpeedup": None}
    seen[name] = answer["metadata"]["averageInputTokens"], answer["hitRateCeiling"], result["hitRate"], result["idealPrefillSpeedup"]
    print("{}: average input {}, ceiling of the hit rate {:.3f}, LRU's {}, speedup {}".format(name, *seen[name]))
is_so = seen["complete blocks"][:3] == (64, 1, 1) and seen["complete blocks"][3] > 100
is_so &= seen["all blocks"][0] == 127 and 0.5 < seen["all blocks"][1] < 0.51
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
