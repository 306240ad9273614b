#!/bin/bash
# Expected: safetensors.numpy's `load(bytes)` and `load_file(path)` read the same types, those that `save` and `save_file` write.
#   These are in the message about a type that is not supported, and bfloat16 and the float8s are among them.
# Happens: for ml_dtypes' bfloat16, `load_file` returns the array, and `load` fails with KeyError: 'BF16' on the same bytes. Its
#   float8_e4m3fn is saved as well, and neither of the two reads it.
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
def is_read(load_it, source, array):
    """Return whether the array comes back, or the error."""
    try:
        found = load_it(source)["keys"]
    except (KeyError, AttributeError) as error:
        return repr(error)
    return found.dtype == array.dtype and found.tobytes() == array.tobytes()


results = {}
for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    array = np.array([1, 2], kind)
    saved = save({"keys": array})
    Path("keys.safetensors").write_bytes(saved)
    results[array.dtype.name] = is_read(load_file, "keys.safetensors", array), is_read(load, saved, array)
    print(f"{array.dtype.name}: load_file: {results[array.dtype.name][0]}, load: {results[array.dtype.name][1]}")
float8 = results.pop("float8_e4m3fn")
is_so = results == {"float16": (True, True), "bfloat16": (True, "KeyError('BF16')")} and True not in float8
is_so &= "bfloat16, float8_e4m3fn" in listed
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
