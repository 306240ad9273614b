#!/bin/bash
# Expected: kvlint simulates vLLM's prefix cache, with eviction, and its README reports that it agreed with vLLM in every run. vLLM frees
#   a request's blocks from the last to the first one, so that a prompt's beginning is evicted last, and the blocks that are left
#   are hits.
# Happens: kvlint uses the blocks from the first to the last one, so that the first one is the oldest and is evicted first. Without
#   it, the others of the prompt are never hits. In the case below, vLLM 0.32's KVCacheManager with memory for four blocks
#   still has 16 tokens of the first prompt, and kvlint has none.
# Versions: kvlint 0.1.1, pydantic 2.14.4, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install pydantic==2.14.4
"$folder/venv/bin/pip" --quiet install --no-deps kvlint==0.1.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from kvlint.sim.vllm_blocks import VLLMBlockSimulator

BLOCK = 16
print("kvlint", version("kvlint"))
first, second = list(range(1000, 1000 + 3 * BLOCK + 1)), list(range(5000, 5000 + 2 * BLOCK + 1))
seen = {}
for budget in (4, 5):
    simulator = VLLMBlockSimulator(BLOCK, budget)
    seen[budget] = [simulator.feed_tokens(str(number), prompt).cached_tokens for number, prompt in enumerate((first, second, first))]
    print(f"memory for {budget} blocks, prompts with 3, 2 and again the 3 blocks: {seen[budget]} tokens cached, {simulator.evictions} evictions")
is_so = seen == {4: [0, 0, 0], 5: [0, 0, 3 * BLOCK]}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
