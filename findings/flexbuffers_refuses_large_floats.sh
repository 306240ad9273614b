#!/bin/bash
# Expected: `flexbuffers.Dumps` of Python's flatbuffers packs a float. FlexBuffers have floats of 32 and 64 bits, and `Dumps` takes 64 where
#   32 lose digits, as for 0.1. The builder's `Float(value, 8)` writes a float of 8 bytes.
# Happens: a float above the range of float32, 3.4e38, is an OverflowError ("float too large to pack with f format"), alone and in a list:
#   to see whether 32 bits are enough, it is packed in 32 bits. So are a sum of squares and a mask of -1e300, while infinity is packed. With
#   the width given, `Float(1e300, 8)` and `Loads` work.
# Versions: flatbuffers 25.12.19, Python 3.11.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install flatbuffers==25.12.19
cd "$folder"
venv/bin/python - <<'PYTHON'
import sys
from importlib.metadata import version

from flatbuffers import flexbuffers


def with_width(number):
    builder = flexbuffers.Builder()
    builder.Float(number, 8)
    return flexbuffers.Loads(bytes(builder.Finish()))


print("flatbuffers", version("flatbuffers"))
refused = []
values = [0.1, 3.4e38, float("inf"), 1e-300, 3.5e38, -1e300, [1e300]]
for value in values:
    try:
        answer = flexbuffers.Loads(bytes(flexbuffers.Dumps(value)))
        assert answer == value
    except OverflowError as error:
        answer = f"{type(error).__name__}: {error}"
        refused.append(value)
    print(f"{value}: {answer}")
is_so = refused == values[4:] and all(with_width(number) == number for number in (3.5e38, -1e300))
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
