#!/bin/bash
# Expected: kvlint's simulation of vLLM's prefix cache counts the tokens that vLLM counts as hits. vLLM computes at least the last token
#   of each prompt, because its logits are needed. So of a prompt with 64 tokens, sent twice, three blocks of 16 tokens are hits and the fourth
#   is computed again. vLLM 0.32's KVCacheManager gives 48.
# Happens: kvlint counts all 64, a hit rate of 100% for the second request. With short prompts in large blocks nothing is
#   left: a prompt with 64 tokens and blocks of 64 is all hits in kvlint and none in vLLM. One more token makes it right.
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

print("kvlint", version("kvlint"))
seen = {}
for length, block in ((64, 16), (64, 64), (65, 16)):
    simulator = VLLMBlockSimulator(block)
    simulator.feed_tokens("first", list(range(length)))
    seen[length, block] = simulator.feed_tokens("second", list(range(length))).cached_tokens
    print(f"{length} tokens in blocks of {block}, sent twice: {seen[length, block]} cached, at most {(length - 1) // block * block} with vLLM")
is_so = seen == {(64, 16): 64, (64, 64): 64, (65, 16): 64}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
