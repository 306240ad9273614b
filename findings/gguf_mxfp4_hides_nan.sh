#!/bin/bash
# Expected: a weight that is NaN or infinite stays visible in a quantized tensor, so that a damaged checkpoint is found: MXFP4's scale
#   has a value for NaN, and gguf's Q8_0, Q4_0 and BF16 give NaN or infinity back. Or `quantize` refuses it.
# Happens: with MXFP4, one NaN or infinity makes all 32 weights of its block 0, those that were fine too. A check for NaN
#   finds nothing in the file.
# Versions: gguf 0.19.0, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install gguf==0.19.0 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
from gguf import GGMLQuantizationType, quants

np.seterr(all="ignore")
print("gguf", version("gguf"), "numpy", np.__version__)
seen = {}
for bad in (np.nan, np.inf):
    weights = np.ones((1, 256), np.float32)
    weights[0, 5] = bad
    for name in ("Q8_0", "Q4_0", "BF16", "MXFP4"):
        kind = GGMLQuantizationType[name]
        back = quants.dequantize(quants.quantize(weights, kind), kind)[0]
        seen[bad, name] = bool(np.isfinite(back).all()), back[:32].tolist() == [0] * 32, back[32:].round(2).tolist() == [1] * 224
        print(f"{name} with one {bad} in the first block: all finite {seen[bad, name][0]}, the block is zeros {seen[bad, name][1]}")
is_so = all(value == ((True, True, True) if name == "MXFP4" else (False, False, True)) for (_, name), value in seen.items())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
