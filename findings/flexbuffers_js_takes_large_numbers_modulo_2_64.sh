#!/bin/bash
# Expected: `encode` of flatbuffers' FlexBuffers for JavaScript takes a number, which is a float of 64 bits, and a bigint, and `toObject`
#   gives it back. What fits neither an integer of 64 bits nor a float is an error. FlexBuffers have unsigned integers too.
# Happens: each number without a fraction, and each bigint, is written as a signed integer of 64 bits, and what is above is dropped. 1e300
#   comes back as 0, 1e19 as -8446744073709551616, and an unsigned hash of 2^63 or more, half of all, as a negative one: 2^64 - 1 as -1.
#   Python reads the same, and writes the hash itself with `UInt`. That numbers above 2^31 come back as bigints is known: google/flatbuffers
#   issue 8010.
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

const [kind, text] = process.argv.slice(2);
const bytes = encode(kind === "bigint" ? BigInt(text) : Number(text));
console.log(`${Buffer.from(bytes).toString("hex")} ${toObject(bytes.buffer)}`);
JAVASCRIPT
venv/bin/python - <<'PYTHON'
import json
import subprocess
import sys
from pathlib import Path

from flatbuffers import flexbuffers

print("flatbuffers for JavaScript", json.loads(Path("node_modules/flatbuffers/package.json").read_text())["version"])
is_so = True
cases = [("number", 2**40), ("bigint", 2**63 - 1), ("number", 10**19), ("number", int(1e300)), ("bigint", 2**63), ("bigint", 2**64 - 1)]
for kind, number in cases:
    written, here = subprocess.run(["node", "encode.mjs", kind, str(number)], capture_output=True, check=True, text=True).stdout.split()
    by_python = flexbuffers.Loads(bytes.fromhex(written))
    print(f"{kind} {number if number < 2**64 else float(number)}: read by JavaScript {here}, by Python {by_python}")
    is_so &= int(here) == by_python == (number + 2**63) % 2**64 - 2**63
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
