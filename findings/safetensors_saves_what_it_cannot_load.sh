#!/bin/bash
# Expected: safetensors.numpy loads what safetensors.numpy saved. Its own list of supported types, which is in
#   the message about a type that it does not support, has bfloat16 and float8s.
# Happens: `save` and `save_file` take arrays of ml_dtypes' bfloat16 and float8_e4m3fn, and write a right file. `load`,
#   `load_file` and `get_tensor` then fail with KeyError: 'BF16', also where ml_dtypes is installed and was imported.
# Versions: safetensors 0.8.0, ml_dtypes 0.6.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import sys

import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import load, save

print("safetensors", safetensors.__version__, "ml_dtypes", ml_dtypes.__version__)
try:
    save({"keys": np.array([1j])})
    listed = ""
except safetensors.SafetensorError as error:
    listed = str(error)
    print(listed)
errors = {}
for kind in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
    saved = save({"keys": np.array([1, 2], kind)})
    size = int.from_bytes(saved[:8], "little")
    header = json.loads(saved[8 : 8 + size])["keys"]
    data = np.frombuffer(saved, kind, offset=8 + size).astype(float).tolist()
    try:
        load(saved)
        errors[header["dtype"]] = None
    except KeyError as error:
        errors[header["dtype"]] = repr(error)
    print(f"saved {header['dtype']} with the values {data}; load: {errors[header['dtype']] or 'right'}")
is_so = errors == {"F16": None, "BF16": "KeyError('BF16')", "F8_E4M3": "KeyError('F8_E4M3')"} and "bfloat16" in listed
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
