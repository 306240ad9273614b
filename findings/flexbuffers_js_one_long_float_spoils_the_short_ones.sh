#!/bin/bash
# Expected: FlexBuffers write a list's floats in one width: if one needs 64 bits, all have 64. `encode` of flatbuffers for JavaScript gives
#   such a list, and `toObject` and the other languages read the numbers that were in it.
# Happens: a float that fits in 32 bits is written as one of 32 bits into a place of 64. In [0.1, 2.5] the 2.5 is read as 5.3e-315, by
#   JavaScript and by Python, without an error. So it is with the values of an object, `{loss: 0.1, rate: 2.5}`. If all numbers need 64 bits,
#   or all fit in 32, they are right, and so is what Python writes and reads.
# Versions: flatbuffers 25.9.23 (npm), Node.js 20, flatbuffers 25.12.19 (Python), Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install flatbuffers==25.12.19
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts flatbuffers@25.9.23
cat >encode.mjs <<'JAVASCRIPT'
import { encode, toObject } from "flatbuffers/mjs/flexbuffers.js";

const bytes = encode(JSON.parse(process.argv[2]));
console.log(JSON.stringify([Buffer.from(bytes).toString("hex"), toObject(bytes.buffer)]));
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import struct
import subprocess
import sys
from pathlib import Path

from flatbuffers import flexbuffers


def spoilt(number):
    """Return what a number reads as if it has 32 bits in a place of 64; one that needs 64 bits stays."""
    short = struct.pack("<f", number)
    return number if struct.unpack("<f", short)[0] != number else struct.unpack("<d", short + bytes(4))[0]


print("flatbuffers for JavaScript", json.loads(Path("node_modules/flatbuffers/package.json").read_text())["version"])
is_so = True
for numbers in ([0.1, 0.2], [0.5, 2.5], [0.1, 2.5], [1.5, 0.1, 0.25], {"loss": 0.1, "rate": 2.5}):
    assert flexbuffers.Loads(bytes(flexbuffers.Dumps(numbers))) == numbers
    call = subprocess.run(["node", "encode.mjs", json.dumps(numbers)], capture_output=True, check=True)
    written, here = json.loads(call.stdout)
    by_python = flexbuffers.Loads(bytes.fromhex(written))
    print(f"{numbers}: read by JavaScript {here}, by Python {by_python}")
    values = numbers.values() if isinstance(numbers, dict) else numbers
    needs_long = any(number == spoilt(number) for number in values)
    expected = [spoilt(number) if needs_long else number for number in values]
    read = [list(each.values()) if isinstance(each, dict) else each for each in (here, by_python)]
    is_so &= read == [expected, expected]
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
