#!/bin/bash
# Expected: safetensors.numpy's `load(bytes)` and `load_file(path)` read the same types, those that `save` and `save_file` write.
#   These are in the message about a type that is not supported, and bfloat16 and the float8s are among them.
# Happens: for bfloat16 and float8_e4m3fn of ml_dtypes, `load_file` returns the array, and `load` fails with KeyError: 'BF16' on
#   the same bytes, which `save` made.
# Versions: safetensors 0.8.0, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import load, load_file, save

print("safetensors", safetensors.__version__, "ml_dtypes", ml_dtypes.__version__)
try:
    save({"keys": np.array([1j])})
    listed = ""
except safetensors.SafetensorError as error:
    listed = str(error)
    print(listed)
results = {}
for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    array = np.array([1, 2], kind)
    saved = save({"keys": array})
    Path("keys.safetensors").write_bytes(saved)
    from_file = load_file("keys.safetensors")["keys"]
    is_right = from_file.dtype == array.dtype and from_file.tobytes() == array.tobytes()
    try:
        from_bytes = str(load(saved)["keys"])
    except KeyError as error:
        from_bytes = repr(error)
    results[array.dtype.name] = is_right, from_bytes
    print(f"{array.dtype.name}: load_file is right: {is_right}, load: {from_bytes}")
is_so = "bfloat16, float8_e4m3fn" in listed and results == {
    "float16": (True, "[1. 2.]"),
    "bfloat16": (True, "KeyError('BF16')"),
    "float8_e4m3fn": (True, "KeyError('F8_E4M3')"),
}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
