#!/bin/bash
# Expected: an array that is saved and loaded has the same numbers in the same places, or `save_file` raises. The documentation asks for
#   contiguous tensors, and safetensors' part for torch raises a ValueError for others.
# Happens: safetensors.numpy writes a transposed array's memory as it lies, with the transposed shape, without an error. So the numbers
#   come back in other places. The same with arrays in Fortran's order. Known: safetensors issue 825, open, since
#   0.8.0; 0.7.0 writes the right order.
# Versions: safetensors 0.8.0 and 0.7.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/transposed.py" <<'PYTHON'
from importlib.metadata import version

import numpy as np
from safetensors.numpy import load_file, save_file

keys = np.arange(6, dtype=np.float32).reshape(2, 3)
save_file({"keys": keys.T, "same": np.asfortranarray(keys)}, "keys.safetensors")
loaded = load_file("keys.safetensors")
print("safetensors", version("safetensors"), end=": ")
print("saved", keys.T.tolist(), "loaded", loaded["keys"].tolist(), end=", in Fortran's order ")
print("saved", keys.tolist(), "loaded", loaded["same"].tolist())
PYTHON
cd "$folder"
for version in 0.7.0 0.8.0; do
  python3 -m venv "venv-$version"
  "venv-$version/bin/pip" --quiet install "safetensors==$version" numpy==2.4.6
  "venv-$version/bin/python" transposed.py | tee "$version"
done
keys='[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]'
transposed='[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]'
loaded() { # version, of the transposed array, of the one in Fortran's order
  [[ $(cat "$1") == "safetensors $1: saved $transposed loaded $2, in Fortran's order saved $keys loaded $3" ]]
}
if loaded 0.7.0 "$transposed" "$keys" && loaded 0.8.0 '[[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]' '[[0.0, 3.0, 1.0], [4.0, 2.0, 5.0]]'; then
  echo "as described"
else
  echo "no longer as described"
  exit 1
fi
