#!/bin/bash
# Expected: the same tensors and the same metadata give the same file. The header sorts the tensors, so that nothing depends on
#   the order in which they were given, and files can be compared, deduplicated or signed by their hash.
# Happens: with two or more entries of metadata, each `save` writes the entries in another order, even within one process, and
#   so makes another file. PYTHONHASHSEED has no influence.
# Versions: safetensors 0.8.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install safetensors==0.8.0 numpy==2.4.6
cd "$folder"
PYTHONHASHSEED=0 venv/bin/python - <<'PYTHON'
import hashlib
import sys

import numpy as np
import safetensors
from safetensors.numpy import save

TENSORS = {name: np.zeros(4, np.float16) for name in ("layer.2", "layer.0", "layer.1")}
METADATA = {"format": "np", "model": "m", "block_size": "16", "layout": "NHD"}


def count(metadata):
    """Return how many different files 50 saves of the same content make."""
    return len({hashlib.sha256(save(TENSORS, metadata)).hexdigest() for _ in range(50)})


print("safetensors", safetensors.__version__)
files = {len(metadata or {}): count(metadata) for metadata in (None, {"format": "np"}, METADATA)}
for entries, number in files.items():
    print(f"50 saves with {entries} entries of metadata: {number} different files")
backwards = dict(reversed(TENSORS.items()))
print("another order of the tensors makes another file:", save(backwards) != save(TENSORS))
is_so = files[0] == files[1] == 1 and files[4] > 1 and save(backwards) == save(TENSORS)
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
