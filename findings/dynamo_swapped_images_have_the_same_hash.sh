#!/bin/bash
# Expected: Dynamo's router gives two blocks different hashes if their images differ or stand in another order, as vLLM does:
#   a block's KV depends on which image stands where. `compute_block_hash_for_seq` takes each image's place ("offsets"), and
#   its docstring promises different hashes for "identical tokens but different multimodal objects".
# Happens: the images' hashes are sorted before they are hashed, and their places are ignored. So "cat, dog" and "dog, cat"
#   have the same block hash, and a worker that holds one prompt is reported as holding the other.
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

CAT, DOG, PLACEHOLDER = 11, 22, 7  # two images' hashes, and the token that stands for an image's patches


def hashes(*images):
    """Return the hash of one block of 8 tokens with these images, 4 tokens each."""
    objects = [{"mm_hash": image, "offsets": [[4 * place, 4 * place + 4]]} for place, image in enumerate(images)]
    return compute_block_hash_for_seq([PLACEHOLDER] * 8, 8, [{"mm_objects": objects}])


tree = RadixTree()
block = {"block_hash": 1, "tokens_hash": hashes(CAT, DOG)[0]}
event = {"event_id": 1, "data": {"stored": {"parent_hash": None, "blocks": [block]}}}
tree.apply_event(5, json.dumps(event).encode())
print("ai-dynamo-runtime", version("ai-dynamo-runtime"))
print("a worker stored a block with the images cat, dog")
found = {}
for images in ((CAT, DOG), (DOG, CAT), (CAT, CAT)):
    found[images] = sum(tree.find_matches(hashes(*images)).scores.values())
    names = ", ".join("cat" if image == CAT else "dog" for image in images)
    print(f"blocks found for {names}: {found[images]}")
is_so = hashes(CAT, DOG) == hashes(DOG, CAT) and found == {(CAT, DOG): 1, (DOG, CAT): 1, (CAT, CAT): 0}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
