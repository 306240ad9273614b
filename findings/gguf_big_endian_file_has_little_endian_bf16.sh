#!/bin/bash
# Expected: a GGUFWriter with `endianess=GGUFEndian.BIG` writes a file whose numbers are all big-endian. The same weights in
#   float32, float16 and bfloat16 begin with the same byte, that of the sign.
# Happens: float32 and float16 are swapped. Bfloat16 and the scales of Q8_0, which `gguf.quants.quantize` returns as bytes, stay
#   little-endian, without a warning. A big-endian reader gets -5.8e-39 for each 1.0. The package's own `gguf-convert-endian`
#   does swap them, so the two ways to a big-endian file give different files.
# Versions: gguf 0.19.0, numpy 2.4.6, Python 3.11, on a little-endian machine.
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
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from gguf.quants import quantize

KINDS = ("F32", "F16", "BF16", "Q8_0")
weights = np.ones(32, np.float32)  # one block of Q8_0: a float16 scale, which is 1/127, and 32 bytes
writer = GGUFWriter("weights.gguf", "llama", endianess=GGUFEndian.BIG)
for name in KINDS:
    kind = GGMLQuantizationType[name]
    writer.add_tensor(name, quantize(weights, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

print("gguf", version("gguf"), "numpy", np.__version__)
seen = {}
for tensor in GGUFReader("weights.gguf").tensors:
    raw = tensor.data.tobytes()
    seen[tensor.name] = raw[: 4 if tensor.name == "F32" else 2].hex()
    print(f"{tensor.name}: the first number's bytes are {seen[tensor.name]}")
read = np.frombuffer(bytes.fromhex(seen["BF16"] + "0000"), ">f4")[0]
scale = np.float16(1 / 127)
print(f"a big-endian reader takes the bfloat16 1.0 for {read:.2g}, and the scale {scale:.4f} for "
      f"{np.frombuffer(bytes.fromhex(seen['Q8_0']), '>f2')[0]:.4f}")
is_so = seen == {"F32": "3f800000", "F16": "3c00", "BF16": "803f", "Q8_0": scale.astype("<f2").tobytes().hex()}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
