#!/bin/bash
# Expected: the scale of a block in MXFP8 and MXFP4 is a power of two, 2^-127 at least. A block of numbers that are smaller than the least scale
#   can show becomes 0, or the next number to it, as with gfloat, which implements the OCP formats.
# Happens: mlx's `quantize` takes the byte of a scale that would be smaller from the other end: 2^-128 becomes 255, which is NaN in the format
#   and 2^128 when `dequantize` reads it. With mode "mxfp8", 32 weights of 1e-36 come back as infinity, and 32 of 1e-39 as 1.2e+38. With
#   "mxfp4" it begins below 1.8e-38. All are numbers of float32, 1e-36 a normal one.
# Versions: mlx 0.32.4 with mlx-cpu 0.32.4, gfloat 0.5.2, numpy 2.4.6, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install "mlx[cpu]==0.32.4" gfloat==0.5.2 numpy==2.4.6
cd "$folder"
venv/bin/python - <<'PYTHON'
import math
import sys
from importlib.metadata import version

import gfloat
import mlx.core as mx
import numpy as np
from gfloat.formats import format_info_mxfp4_e2m1, format_info_mxfp8_e4m3

mx.set_default_device(mx.cpu)
FORMATS = {"mxfp8": format_info_mxfp8_e4m3, "mxfp4": format_info_mxfp4_e2m1}


def by_mlx(mode, number):
    """Return the number as it comes back, and the byte of the scale."""
    quantized, scales = mx.quantize(mx.full((1, 32), number, mx.float32), mode=mode)
    numbers = mx.dequantize(quantized, scales, mode=mode, dtype=mx.float32)
    return float(numbers[0, 0]), int(scales[0, 0])


def by_gfloat(mode, number):
    block = gfloat.quantize_block(FORMATS[mode], np.full(32, number), gfloat.compute_scale_amax)
    return float(np.array(list(block))[0])


print("mlx", version("mlx"))
seen, others = {}, {}
for mode in FORMATS:
    for number in (1e-30, 1e-36, 1e-38, 1e-39):
        seen[mode, number], scale = by_mlx(mode, number)
        others[mode, number] = by_gfloat(mode, number)
        print(f"{mode}: {number} comes back as {seen[mode, number]:.4g}, scale {scale}; from gfloat as {others[mode, number]:.4g}")
large = {key for key, number in seen.items() if number > 1e38}
infinite = {key for key, number in seen.items() if math.isinf(number)}
is_so = large == {("mxfp8", 1e-36), ("mxfp8", 1e-38), ("mxfp8", 1e-39), ("mxfp4", 1e-38), ("mxfp4", 1e-39)}
is_so &= infinite == {("mxfp8", 1e-36), ("mxfp8", 1e-38), ("mxfp4", 1e-38)}
is_so &= all(number <= 1.25 * key[1] for key, number in others.items())
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
