#!/bin/bash
# Expected: `find_matches(sequence, early_exit=True)` of Dynamo's RadixTree "stops searching after finding the first match", as its
#   documentation says, so that the question whether any worker has a prompt's beginning is cheap for a prompt of any length. The
#   scores of all workers are then 1.
# Happens: the option has no effect. With one worker or three, the search goes on to the end of the prompt, and the scores are those
#   without the option. The documented `frequencies` of the answer are always an empty list.
# Versions: ai-dynamo-runtime 1.6.1, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install ai-dynamo-runtime==1.6.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys
from importlib.metadata import version

from dynamo.llm import RadixTree, compute_block_hash_for_seq

BLOCK = 16
print("ai-dynamo-runtime", version("ai-dynamo-runtime"))
prompt = compute_block_hash_for_seq(list(range(100 * BLOCK)), BLOCK)
tree, seen = RadixTree(), []
for worker, length in ((1, 100), (2, 50), (3, 10)):
    blocks = [{"block_hash": 1000 + number, "tokens_hash": hash_} for number, hash_ in enumerate(prompt[:length])]
    tree.apply_event(worker, json.dumps({"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}).encode())
    answers = [tree.find_matches(prompt, early_exit=early_exit) for early_exit in (False, True)]
    seen.append([(sorted(answer.scores.values()), answer.frequencies) for answer in answers])
    print(f"{len(seen)} workers: scores {seen[-1][0][0]}, with early_exit {seen[-1][1][0]}, frequencies {seen[-1][0][1]}")
is_so = seen == [[([100], [])] * 2, [([50, 100], [])] * 2, [([10, 50, 100], [])] * 2]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
