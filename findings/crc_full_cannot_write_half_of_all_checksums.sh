#!/bin/bash
# Expected: crc-full's `compute` gives a CRC and `computeBuffer` the same one as bytes, for each of its models. A CRC of 32 bits is a number
#   from 0 to 4,294,967,295, as zlib's is, and four bytes.
# Happens: a 32-bit CRC with its highest bit set, half of all, comes out of `compute` as a negative number, and `computeBuffer` raises an
#   ERR_OUT_OF_RANGE. So a block's checksum can be stored or not, depending on the block, and `compute` is equal to what a header says for
#   half of the blocks only. With 8 and 16 bits all are right.
# Versions: crc-full 1.1.0 (npm), Node.js 20, Python 3.11. Needs npm.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-audit --no-fund --ignore-scripts crc-full@1.1.0
cat >checksums.cjs <<'JAVASCRIPT'
const { CRC } = require("crc-full");

const crc = CRC.default("CRC32");
const asBytes = (block) => {
  try {
    return parseInt(crc.computeBuffer(block).toString("hex"), 16);
  } catch (error) {
    return error.code;
  }
};
const blocks = Array.from({ length: 1000 }, (_, number) => Buffer.from(`block ${number}`));
console.log(JSON.stringify(blocks.map((block) => [crc.compute(block), asBytes(block)])));
JAVASCRIPT
python3 - <<'PYTHON'
import json
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

print("crc-full", json.loads(Path("node_modules/crc-full/package.json").read_text())["version"])
seen = Counter()
answer = json.loads(subprocess.run(["node", "checksums.cjs"], capture_output=True, check=True).stdout)
for number, (as_number, as_bytes) in enumerate(answer):
    right = zlib.crc32(f"block {number}".encode())
    kind = "as zlib's" if (as_number, as_bytes) == (right, right) else "other"
    if (as_number, as_bytes) == (right - 2**32, "ERR_OUT_OF_RANGE"):
        kind = "negative, and an error as bytes"
    seen[kind, "below 2^31" if right < 2**31 else "2^31 or more"] += 1
for (kind, size), count in sorted(seen.items()):
    print(f"{count} checksums of {size}: {kind}")
is_so = set(seen) == {("as zlib's", "below 2^31"), ("negative, and an error as bytes", "2^31 or more")}
print("as described" if is_so else "no longer as described")
sys.exit(not is_so)
PYTHON
